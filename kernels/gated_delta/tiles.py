"""Tile sizes of the Mosaic kernels of the gated delta rule, and which sizes those kernels can run at all."""

from dataclasses import dataclass

import jax.numpy as jnp

from gdn_jax.kernels.dispatch import UnsupportedKernelError

WIDTHS = (64, 128)  # of keys and values
STATE_DTYPES = ("float32", "float16", "bfloat16")
COLUMNS = 64  # value columns that one warpgroup of a prefill owns: a tensor-core product has 64 rows
MULTIPROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True, kw_only=True)
class AdvanceTiles:
    """How the advance is cut up; no choice changes a bit of what is computed.

    Attributes:
        value_rows: rows of a transposed state `[dv, dk]` that one program owns, 32 or 64. Fewer rows need fewer
            registers, so that more programs share a multiprocessor; more rows share the work on keys and queries.
    """

    value_rows: int

    def __post_init__(self) -> None:
        if self.value_rows not in (32, 64):
            raise ValueError(f"a tile must have 32 or 64 rows, 8 or 16 for each warp; got {self.value_rows}")


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """How the serial kernel of the prefill is cut up; no choice changes a bit of what is computed.

    Attributes:
        warpgroups: those that multiply in one program; each owns COLUMNS value columns of one head.
        stages: turns of their loop for which shared memory holds queries, values and factors; 2 or more, the one that
            is under way and those ahead.
        chain_registers: of a thread that multiplies, where more than one warpgroup does.
        copy_registers: of a thread that copies, then.
    """

    warpgroups: int
    stages: int
    chain_registers: int = 240
    copy_registers: int = 24

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2):
            raise ValueError(f"a program must have 1 or 2 warpgroups that multiply; got {self.warpgroups}")
        if self.stages < 2:
            raise ValueError(f"stages must be 2 or more, a turn and the next one; got {self.stages}")


def prefill_tiles(num_states: int, value_dim: int) -> PrefillTiles:
    """Choose tiles for an H200 and `num_states` states, one for each row and value head.

    Two warpgroups share what is copied and hide each other's waits, but fill half as many multiprocessors. Beside the
    room for their states, shared memory has room for two stages.
    """
    num_programs = num_states * value_dim // COLUMNS
    if num_programs > MULTIPROCESSORS and value_dim > COLUMNS:
        return PrefillTiles(warpgroups=2, stages=2)
    return PrefillTiles(warpgroups=1, stages=3)


def advance_tiles(num_states: int, value_dim: int, window: int, state_dtype: jnp.dtype) -> AdvanceTiles:
    """Choose tiles for `num_states` states, one for each row of the batch and value head, and `window` new tokens.

    With 64 rows a program takes up to 128 registers a thread, and four of them share a multiprocessor. Where there is
    little to compute (one token on a float32 state), or a batch leaves some multiprocessors without a program, twice as
    many programs of half the size are faster.
    """
    num_programs = num_states * value_dim // 64
    is_light = window == 1 and jnp.dtype(state_dtype) == jnp.float32
    return AdvanceTiles(value_rows=32 if is_light or num_programs < MULTIPROCESSORS else 64)


def check_advance(num_key: int, num_value: int, key_dim: int, value_dim: int, state_dtype: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless the Mosaic advance can run these sizes."""
    remedy = "ask for kernels='jax', which runs any size"
    if key_dim not in WIDTHS or value_dim not in WIDTHS:
        raise UnsupportedKernelError(
            f"widths of keys and values must be 64 or 128 for Mosaic kernels; got {key_dim} and {value_dim}; {remedy}"
        )
    if num_value % num_key:
        raise UnsupportedKernelError(
            f"the number of value heads must be a multiple of that of key heads; got {num_value} and {num_key}"
        )
    name = jnp.dtype(state_dtype).name
    if name not in STATE_DTYPES:
        raise UnsupportedKernelError(
            f"states must be one of {', '.join(STATE_DTYPES)} for Mosaic kernels; got {name}; {remedy}"
        )


def check_prefill(num_key: int, num_value: int, key_dim: int, value_dim: int, state_dtype: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless the Mosaic prefill can run these sizes: those of the advance."""
    check_advance(num_key, num_value, key_dim, value_dim, state_dtype)


def check_operands(*dtypes: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless tensor cores multiply these dtypes of queries, keys and values."""
    if len(set(dtypes)) > 1 or dtypes[0] not in (jnp.bfloat16, jnp.float16):
        names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise UnsupportedKernelError(
            f"queries, keys and values must all be bfloat16 or all float16 for the Mosaic prefill; got {names}; "
            "ask for kernels='jax', which runs any dtype"
        )


def check_mixer(num_key: int, num_value: int, key_dim: int, value_dim: int, state_dtype: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless the Mosaic mixer, which the advance is part of, can run these sizes."""
    check_advance(num_key, num_value, key_dim, value_dim, state_dtype)
    if key_dim != value_dim:
        raise UnsupportedKernelError(
            f"keys and values must be of one width for the Mosaic mixer; got {key_dim} and {value_dim}; "
            "ask for kernels='jax', which runs any size"
        )
