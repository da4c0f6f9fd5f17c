"""What tests of the gated delta rule compare, and how they change the rows of a case."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.kernels.gated_delta.cases import PrefillArguments


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Compare relative to the largest expected magnitude; a NaN anywhere fails."""
    error = np.abs(got.astype(np.float64) - want).max(initial=0.0)
    assert error <= tolerance * np.abs(want).max(initial=1e-30), f"error {error}"


def assert_stored(pool: np.ndarray, before: jax.Array, stored: dict[int, np.ndarray], tolerance: float) -> None:
    """Slots in `stored` hold their states; every other slot, the null slot too, has the bits it had."""
    assert pool.dtype == before.dtype
    for slot, state in stored.items():
        assert_close(pool[slot], state, tolerance)
    untouched = [slot for slot in range(pool.shape[0]) if slot not in stored]
    assert pool[untouched].tobytes() == np.asarray(before)[untouched].tobytes()


def with_rows(args: PrefillArguments, **changes: object) -> PrefillArguments:
    """Return the arguments with some fields of the rows replaced."""
    changed = {name: jnp.asarray(value, jnp.int32) for name, value in changes.items()}
    return replace(args, rows=replace(args.rows, **changed))
