"""How the work of an attention kernel is cut: query tiles, stages of pages, parts of a sequence.

All of it follows from static sizes, never from what the rows hold; how many parts of its sequence a row really uses
follows from its own length (`split`). So neighbours change no bit of a row.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.kernels.numerics import CHUNK

TILE_QUERIES = 64  # queries of one tensor-core product: a warpgroup multiplies 64 rows whether they are used or not
WIDTHS = (64, 128, 256)  # of a head
MAX_QUERIES = 2 * TILE_QUERIES  # of one row and KV head; three tiles would leave room for one page in shared memory
SHARED_BYTES = 227 * 1024  # shared memory that one program may have on Hopper
_OTHER_BYTES = 2048  # of it, for barriers and alignment
_PROGRAMS = 132  # programs that run at once on an H200, one on each of its multiprocessors
_MAX_STAGES = 4
_COMBINE_STAGES = 4  # where several programs share a multiprocessor
_MIN_PARTS = 8  # where the table is wide enough
_SPLIT_PAGES = 8192 // CHUNK  # a row of so many pages fills the GPU together with the others
_MIN_PAGES, _MAX_PAGES = 4, 64  # a program starts and ends in about the time of two pages


@dataclass(frozen=True, kw_only=True)
class AdvanceTiles:
    """Sizes of the advance kernel; a *part* is a run of pages of one row that one program reads for one KV head."""

    query_tiles: int  # tiles of queries of one KV head, each multiplied by a warpgroup of its own
    tile_queries: int  # queries of one tile that are kept, a multiple of 8
    stages: int  # pages of keys, and as many of values, that shared memory holds
    columns: int  # columns of the values that are cleared, and of the result that are stored, at once
    attend_registers: int  # of a thread that multiplies, where two tiles of queries have to share them
    load_registers: int  # of a thread that loads, then
    parts: int  # most parts that a row is split into
    least_pages: int  # pages below which a part is not split further
    combine_stages: int  # results of parts that shared memory holds while they are combined

    def __post_init__(self) -> None:
        if self.tile_queries % 8 or not 0 < self.tile_queries <= TILE_QUERIES:
            raise ValueError(f"tile_queries must be a multiple of 8 up to {TILE_QUERIES}; got {self.tile_queries}")
        if min(self.query_tiles, self.stages, self.parts, self.least_pages, self.combine_stages) < 1:
            raise ValueError(f"tiles, stages, parts and pages of a part must be at least 1; got {self}")


def check_dtype(dtype: jnp.dtype) -> None:
    """Raise UnsupportedKernelError unless tensor cores multiply this dtype as attention needs it."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedKernelError(
            f"queries and pages must be bfloat16 or float16 for the Mosaic attention; got {dtype}; "
            "ask for kernels='jax'"
        )


def check_pages(*, width: int, block_size: int) -> None:
    """Raise UnsupportedKernelError unless the Mosaic kernels can read such pages: all that prefill asks for.

    Args:
        width: of a head.
        block_size: tokens of a page.
    """
    for fits, rule, value in (
        (width in WIDTHS, f"heads must be {', '.join(map(str, WIDTHS))} wide", width),
        (block_size == CHUNK, f"pages must hold {CHUNK} tokens", block_size),
    ):
        if not fits:
            raise UnsupportedKernelError(f"{rule} for the Mosaic attention; got {value}; ask for kernels='jax'")


def check_advance(*, width: int, block_size: int, queries: int) -> None:
    """Raise UnsupportedKernelError unless the Mosaic advance can run these sizes.

    Args:
        width: of a head.
        block_size: tokens of a page.
        queries: queries of one row that read the same KV head: tokens of the window times heads of the group.
    """
    check_pages(width=width, block_size=block_size)
    if queries > MAX_QUERIES:
        raise UnsupportedKernelError(
            f"new tokens of a row times query heads per KV head must be at most {MAX_QUERIES} for the Mosaic "
            f"attention; got {queries}; draft fewer tokens, or ask for kernels='jax'"
        )


def check_dtypes(q: jnp.dtype, k: jnp.dtype, v: jnp.dtype, *, interpret: bool) -> None:
    """Raise UnsupportedKernelError unless queries and pages are of one dtype that attention can multiply.

    Args:
        q: of the queries.
        k: of the keys.
        v: of the values.
        interpret: whether the interpreter multiplies, which takes float32 too.
    """
    if len({q, k, v}) > 1:
        raise UnsupportedKernelError(
            f"queries and pages must be of one dtype for the Mosaic attention; got {q}, {k} and {v}; "
            "ask for kernels='jax'"
        )
    if not interpret:
        check_dtype(q)


def choose_advance_tiles(
    *, rows: int, blocks: int, kv_heads: int, queries: int, width: int, item_bytes: int
) -> AdvanceTiles:
    """Choose sizes for an H200.

    Args:
        rows: rows of the step, padding included.
        blocks: width of the block tables.
        kv_heads: KV heads.
        queries: queries of one row that read the same KV head: tokens of the window times heads of the group.
        width: width of a head.
        item_bytes: bytes of one stored number.
    """
    query_tiles = -(-queries // TILE_QUERIES)
    tile_queries = -(-queries // query_tiles)
    columns = min(64, width)
    out_bytes = TILE_QUERIES * columns * 4
    per_tile = TILE_QUERIES * (width * item_bytes + 4) + out_bytes
    stages = (SHARED_BYTES - _OTHER_BYTES - query_tiles * per_tile) // (2 * CHUNK * width * item_bytes)
    # How many parts of each row run at once. A row of 8k tokens is split into as many, and a longer one into longer
    # parts; yet up to eight, so that a long row among many is not the last to end by far.
    at_once = max(1, _PROGRAMS // (rows * kv_heads))
    parts, least_pages = max(_MIN_PARTS, at_once), min(max(_MIN_PAGES, _SPLIT_PAGES // at_once), _MAX_PAGES)
    return AdvanceTiles(
        query_tiles=query_tiles,
        tile_queries=-(-tile_queries // 8) * 8,
        stages=min(stages, _MAX_STAGES),
        columns=columns,
        attend_registers=240,
        load_registers=24,
        parts=min(parts, -(-blocks // least_pages)),
        least_pages=least_pages,
        combine_stages=choose_combine_stages(rows * kv_heads * query_tiles * (width // columns), columns),
    )


def choose_combine_stages(programs: int, columns: int) -> int:
    """Choose how many results of parts shared memory holds, for so many programs that combine so many columns."""
    # Combining waits for memory more than it computes: a program alone on its multiprocessor has all it can in flight.
    if programs > _PROGRAMS:
        return _COMBINE_STAGES
    return (SHARED_BYTES - _OTHER_BYTES - TILE_QUERIES * columns * 4) // (TILE_QUERIES * (columns + 1) * 4)


def num_pages(num_keys: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Return how many pages hold so many keys."""
    return _ceil_div(num_keys, CHUNK)


def split(pages: Int[Array, "*rows"], tiles: AdvanceTiles) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    """Return into how many parts a row of so many pages is split, and the pages of each part but the last.

    Both follow from the row's own pages; a row without pages has no parts. The kernel traces this, too.
    """
    wanted = jnp.clip(_ceil_div(pages, tiles.least_pages), 1, tiles.parts)
    each = jnp.maximum(_ceil_div(pages, wanted), 1)
    return _ceil_div(pages, each), each  # 5 pages in 4 parts: 2 each, so 3 parts hold them all


def run_of(part: Int[Array, ""], pages: Int[Array, ""], tiles: AdvanceTiles) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the first page of a part of a row of so many pages, and its pages (not positive: it is not in use)."""
    _, each = split(pages, tiles)
    first = part * each
    return first, jnp.minimum(first + each, pages) - first


def _ceil_div(count: Int[Array, "*rows"], by: Int[Array, "*rows"] | int) -> Int[Array, "*rows"]:
    return lax.div(count + (by - 1), jnp.asarray(by, count.dtype))
