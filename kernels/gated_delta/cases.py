"""Named shapes of the gated delta rule, and seeded inputs for them: one list for tests, benchmarks and tuning.

Benchmark names follow the results files: `prefill/16x32/8x1024` is 8 rows of 1024 tokens with 16 key and 32 value
heads of width 128; `advance/float32/B64/T1` is 64 rows of 1 new token on float32 states of the same heads.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.numerics import CHUNK


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Head counts and widths of a GDN layer."""

    num_key: int
    num_value: int
    key_dim: int
    value_dim: int


class Span(NamedTuple):
    """One row of a prefill: the position of its first token, and how many it has."""

    start: int
    length: int


class Advance(NamedTuple):
    """The counts of one row of an advance, as in `AdvanceRows`; `save_at` 0 asks for no save."""

    folded: int
    num_replay: int
    num_new: int
    save_at: int = 0


@dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """A packed prefill.

    Attributes:
        spans: rows in packing order; further rows up to `num_rows` are padding.
        num_tokens: length of the packed axis; tokens past the last span are padding.
        num_rows: rows with padding.
        export_every: export the state at each boundary that is a multiple of it; 0: none.
        min_slots: least size of the pool, to give different packings one shape.
    """

    name: str
    heads: Heads
    spans: tuple[Span, ...]
    num_tokens: int
    num_rows: int
    dtype: str = "float32"
    state_dtype: str = "float32"
    export_every: int = 0
    min_slots: int = 0


@dataclass(frozen=True, kw_only=True)
class AdvanceCase:
    """A decode or verify step.

    Attributes:
        spans: rows; further ones up to `num_rows` are padding.
        num_rows: rows with padding.
        window: new tokens per row, with padding; the replay window has the same size.
    """

    name: str
    heads: Heads
    spans: tuple[Advance, ...]
    num_rows: int
    window: int
    dtype: str = "float32"
    state_dtype: str = "float32"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillArguments:
    """Arguments of `gdn_prefill`, in order."""

    q: Float[Array, "T Nk dk"]
    inputs: DeltaInputs
    rows: PrefillRows
    pool: Float[Array, "slots Nv dv dk"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AdvanceArguments:
    """Arguments of `gdn_advance`, in order."""

    q: Float[Array, "rows T Nk dk"]
    new: DeltaInputs
    replay: DeltaInputs
    rows: AdvanceRows
    pool: Float[Array, "slots Nv dv dk"]


def make_prefill(case: PrefillCase, seed: int = 0) -> PrefillArguments:
    """Draw the arguments of a case. Whatever no row owns is NaN: unowned tokens, and slots that no row reads.

    A row that starts at position 0 reads the null slot. Every second other row is continued in place, the rest read one
    slot and write another.
    """
    rng = np.random.default_rng(seed)
    rows, num_slots = make_rows(case)
    owned = np.arange(case.num_tokens) < int(rows.length.sum())
    q, inputs = _draw_tokens(rng, case.heads, owned, case.dtype)
    pool = _draw_pool(rng, case.heads, num_slots, np.asarray(rows.read_slot), case.state_dtype)
    return PrefillArguments(q=q, inputs=inputs, rows=rows, pool=pool)


def make_rows(case: PrefillCase) -> tuple[PrefillRows, int]:
    """Return the rows of a case, as `make_prefill` says, and how many slots they need."""
    num_padding = case.num_rows - len(case.spans)
    start, length = np.array([*case.spans, *[Span(0, 0)] * num_padding], np.int32).reshape(-1, 2).T
    offset = np.cumsum(length) - length
    row = np.arange(case.num_rows, dtype=np.int32)
    real = row < len(case.spans)
    read = np.where(real & (start > 0), 1 + row, NULL_SLOT)
    write = np.where(real, np.where((start > 0) & (row % 2 == 1), read, 1 + case.num_rows + row), NULL_SLOT)

    num_boundaries = case.num_tokens // CHUNK + 1
    count = (start[:, None] // CHUNK + 1 + np.arange(num_boundaries)) * CHUNK
    exported = real[:, None] & (count <= (start + length)[:, None]) & (case.export_every > 0)
    exported &= count % max(case.export_every, 1) == 0
    first_export = 1 + 2 * case.num_rows
    export = np.where(exported, first_export + np.cumsum(exported).reshape(exported.shape) - 1, NULL_SLOT)

    num_slots = max(first_export + int(exported.sum()) + 1, case.min_slots)
    fields = _int32(offset=offset, length=length, start=start, read_slot=read, write_slot=write, export_slot=export)
    return PrefillRows(**fields), num_slots


def make_advance(case: AdvanceCase, seed: int = 0) -> AdvanceArguments:
    """Draw the arguments of a case; NaN whatever no row owns: tokens past a row's counts, slots that no row reads.

    Every second row is folded in place, the rest read one slot and write another.
    """
    rng = np.random.default_rng(seed)
    num_padding = case.num_rows - len(case.spans)
    spans = np.array([*case.spans, *[Advance(0, 0, 0)] * num_padding], np.int32).reshape(-1, 4)
    folded, num_replay, num_new, save_at = spans.T
    row = np.arange(case.num_rows, dtype=np.int32)
    real = row < len(case.spans)
    read = np.where(real & (folded > 0), 1 + row, NULL_SLOT)
    write = np.where(real, np.where((folded > 0) & (row % 2 == 1), read, 1 + case.num_rows + row), NULL_SLOT)
    save = np.where(save_at > 0, 1 + 2 * case.num_rows + row, NULL_SLOT)

    q, new = _draw_tokens(rng, case.heads, np.arange(case.window) < num_new[:, None], case.dtype)
    _, replay = _draw_tokens(rng, case.heads, np.arange(case.window) < num_replay[:, None], case.dtype)
    counts = _int32(folded=folded, num_replay=num_replay, num_new=num_new, save_at=save_at)
    return AdvanceArguments(
        q=q,
        new=new,
        replay=replay,
        rows=AdvanceRows(**counts, **_int32(read_slot=read, write_slot=write, save_slot=save)),
        pool=_draw_pool(rng, case.heads, 2 + 3 * case.num_rows, read, case.state_dtype),
    )


def _draw_tokens(
    rng: np.random.Generator, heads: Heads, owned: np.ndarray, dtype: str
) -> tuple[Float[Array, "..."], DeltaInputs]:
    """Draw normalised queries and keys, values, log decays from 0 to about -3 and betas; NaN where not `owned`."""

    def poisoned(x: np.ndarray, dtype: str) -> Array:
        mask = owned.reshape(owned.shape + (1,) * (x.ndim - owned.ndim))
        return jnp.asarray(np.where(mask, x, np.nan), dtype)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((*owned.shape, *shape), dtype=np.float32)

    def unit(*shape: int) -> np.ndarray:
        x = normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys, values = (heads.num_key, heads.key_dim), (heads.num_value, heads.value_dim)
    g = -rng.exponential(0.3, (*owned.shape, heads.num_value)) * rng.integers(0, 2, (*owned.shape, heads.num_value))
    beta = rng.uniform(0.0, 1.0, (*owned.shape, heads.num_value))
    inputs = DeltaInputs(
        k=poisoned(unit(*keys), dtype),
        v=poisoned(normal(*values), dtype),
        g=poisoned(g, "float32"),
        beta=poisoned(beta, "float32"),
    )
    return poisoned(unit(*keys) * heads.key_dim**-0.5, dtype), inputs


def _draw_pool(
    rng: np.random.Generator, heads: Heads, num_slots: int, read_slot: np.ndarray, dtype: str
) -> Float[Array, "slots Nv dv dk"]:
    """Draw the states at the slots that are read; all others, the null slot among them, hold NaN."""
    shape = (heads.num_value, heads.value_dim, heads.key_dim)
    pool = np.full((num_slots, *shape), np.nan, np.float32)
    for slot in np.unique(read_slot[read_slot != NULL_SLOT]):
        pool[slot] = rng.standard_normal(shape)
    return jnp.asarray(pool, dtype)


def _int32(**fields: np.ndarray) -> dict[str, Array]:
    return {name: jnp.asarray(value, jnp.int32) for name, value in fields.items()}


_REAL = Heads(num_key=16, num_value=32, key_dim=128, value_dim=128)  # Qwen3-Next, Qwen3.5 4B, 9B, 35B-A3B


def _prefill_benchmark(*lengths: int, export_every: int = 0, heads: Heads = _REAL) -> PrefillCase:
    is_even = len(set(lengths)) == 1
    rows = f"{len(lengths)}x{lengths[0]}" if is_even else "+".join(map(str, lengths))
    export = f"/export{export_every}" if export_every else ""
    return PrefillCase(
        name=f"prefill/{heads.num_key}x{heads.num_value}/{rows}{export}",
        heads=heads,
        spans=tuple(Span(0, length) for length in lengths),
        num_tokens=sum(lengths),
        num_rows=len(lengths),
        dtype="bfloat16",
        export_every=export_every,
    )


def _advance_benchmark(state_dtype: str, num_rows: int, window: int) -> AdvanceCase:
    return AdvanceCase(
        name=f"advance/{state_dtype}/B{num_rows}/T{window}",
        heads=_REAL,
        spans=(Advance(1024, window, window),) * num_rows,
        num_rows=num_rows,
        window=window,
        dtype="bfloat16",
        state_dtype=state_dtype,
    )


# float32, short enough for the token-by-token reference: states that fit a second-level cache, and real ones
CPU_BENCHMARKS = tuple(
    PrefillCase(
        name=name, heads=heads, spans=(Span(0, num_tokens),), num_tokens=num_tokens, num_rows=1, dtype="float32"
    )
    for name, heads, num_tokens in (
        ("prefill/4x8/1x2048/width64", Heads(num_key=4, num_value=8, key_dim=64, value_dim=64), 2048),
        ("prefill/16x32/1x1024/float32", _REAL, 1024),
    )
)

PREFILL_BENCHMARKS = (
    *(_prefill_benchmark(*lengths, export_every=every) for lengths in ((8192,), (2048,) * 4) for every in (0, 512)),
    *(_prefill_benchmark(*lengths) for lengths in ((2048,), (4096,), (1024,) * 8, (8192,) * 4, (1024, 7168))),
    *(
        _prefill_benchmark(8192, heads=replace(_REAL, num_key=key, num_value=value))
        for key, value in ((16, 64), (2, 8))
    ),
    _prefill_benchmark(32768),
)
ADVANCE_BENCHMARKS = tuple(
    _advance_benchmark(state_dtype, num_rows, window)
    for state_dtype in ("float32", "float16", "bfloat16")
    for window in (1, 4)
    for num_rows in (1, 8, 64, 256)
)

_SMALL = Heads(num_key=2, num_value=4, key_dim=16, value_dim=16)


def _prefill_test(name: str, *spans: tuple[int, int]) -> PrefillCase:
    """A test packing in one common shape, so that all of them share a compilation and may be compared bit for bit."""
    return PrefillCase(
        name=f"test/{name}",
        heads=_SMALL,
        spans=tuple(Span(*span) for span in spans),
        num_tokens=256,
        num_rows=4,
        export_every=CHUNK,
        min_slots=16,
    )


def _heads_test(num_key: int, num_value: int, key_dim: int, value_dim: int) -> PrefillCase:
    return PrefillCase(
        name=f"test/heads/{num_key}x{num_value}/{key_dim}x{value_dim}",
        heads=Heads(num_key=num_key, num_value=num_value, key_dim=key_dim, value_dim=value_dim),
        spans=(Span(0, 66), Span(64, 9)),
        num_tokens=80,
        num_rows=2,
        export_every=CHUNK,
    )


PREFILL_TESTS = (
    _prefill_test("lengths", (0, 1), (0, 63), (0, 64), (0, 65)),
    _prefill_test("one-row", (0, 256)),
    _prefill_test("continued", (64, 64), (128, 1), (192, 63), (64, 65)),
    _prefill_test("misaligned", (70, 100), (63, 2), (1, 1), (127, 66)),
    _prefill_test("empty-rows", (0, 0), (64, 0), (70, 70), (5, 0)),
    _prefill_test("nothing"),
)
HEADS_TESTS = tuple(_heads_test(*heads) for heads in ((3, 3, 24, 16), (1, 3, 16, 24), (1, 4, 128, 64), (1, 8, 64, 16)))
_NARROW = Heads(num_key=2, num_value=4, key_dim=64, value_dim=64)  # the least that every advance runs


def _advance_test(name: str, *spans: Advance, heads: Heads = _NARROW, window: int = 4) -> AdvanceCase:
    """A test of an advance, with a row of padding at the end."""
    return AdvanceCase(name=f"test/advance/{name}", heads=heads, spans=spans, num_rows=len(spans) + 1, window=window)


def _advance_heads_test(num_key: int, num_value: int, key_dim: int, value_dim: int) -> AdvanceCase:
    heads = Heads(num_key=num_key, num_value=num_value, key_dim=key_dim, value_dim=value_dim)
    name = f"heads/{num_key}x{num_value}/{key_dim}x{value_dim}"
    return _advance_test(name, Advance(62, 2, 1, 64), heads=heads, window=2)


ADVANCE_TESTS = (
    _advance_test("decode", Advance(10, 1, 1), Advance(63, 1, 1, 64), Advance(0, 1, 1), Advance(64, 1, 1, 64)),
    _advance_test(
        "verify",
        Advance(60, 4, 4, 64),
        Advance(61, 4, 3, 64),
        Advance(62, 1, 4, 64),
        Advance(7, 0, 2),
        Advance(3, 4, 0),
    ),
    _advance_test("one-token", Advance(10, 1, 1), window=1),
    _advance_test("nine-tokens", Advance(56, 9, 9, 64), window=9),
    *(
        _advance_heads_test(*heads)
        for heads in ((1, 1, 64, 128), (2, 4, 128, 64), (1, 3, 64, 64), (2, 8, 128, 128), (1, 8, 64, 64))
    ),
)

_ALL = (*CPU_BENCHMARKS, *PREFILL_BENCHMARKS, *ADVANCE_BENCHMARKS, *PREFILL_TESTS, *HEADS_TESTS, *ADVANCE_TESTS)
CASES: dict[str, PrefillCase | AdvanceCase] = {case.name: case for case in _ALL}
