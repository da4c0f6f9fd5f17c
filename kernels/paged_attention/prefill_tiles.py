"""How the work of the Mosaic prefill attention is cut: heads and tokens of a query tile, stages, parts of a row.

All of it follows from static sizes. Where rows are split into parts, which only few tokens are, parts begin at fixed
multiples of pages: so neither neighbours nor the cut of a prompt into spans of one size change a bit of a row.
"""

from dataclasses import dataclass

from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.strips import num_strips
from gdn_jax.kernels.paged_attention.tiles import SHARED_BYTES, TILE_QUERIES

WARPGROUPS = 2  # that multiply; registers hold no third tile's result 256 wide
_TILE_HEADS = 8  # at most: a copy brings a multiple of eight tokens of a head
_OTHER_BYTES = 3072  # of shared memory, for barriers, sums of weights and alignment
_PROGRAMS = 132  # programs that run at once on an H200, one on each of its multiprocessors
# Tokens of a call beyond which no row is split, whatever the heads: a strip has no more tokens than queries.
MOST_SPLIT_TOKENS = _PROGRAMS // 2 * WARPGROUPS * TILE_QUERIES
_MAX_STAGES = 4
_PART_PAGES = 32  # a part lasts some 40 us, ten times what it takes to start and to end one


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """Sizes of the prefill kernel; a *part* is a run of pages that one program reads for one strip.

    A tile of 64 queries holds a run of tokens for each of some query heads that read one KV head.
    """

    heads: int  # query heads of a tile, a power of two up to 8
    head_tiles: int  # tiles that the query heads of one KV head take
    stages: int  # pages of keys, and as many of values, that shared memory holds
    columns: int  # columns of the values that are cleared, and of a part's result that are stored, at once
    plain_rows: int  # rows of a tile that are stored token by token at once
    parts: int  # most parts that a row is split into
    part_pages: int  # pages of a part, or 0 where no row is split
    attend_registers: int  # of a thread that multiplies
    load_registers: int  # of a thread that loads

    def __post_init__(self) -> None:
        if self.heads not in (1, 2, 4, _TILE_HEADS):
            raise ValueError(f"heads must be a power of two up to {_TILE_HEADS}; got {self.heads}")
        if min(self.stages, self.parts, self.head_tiles) < 1:
            raise ValueError(f"stages, parts and head_tiles must be at least 1; got {self}")

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return TILE_QUERIES // self.heads

    @property
    def strip_tokens(self) -> int:
        """Tokens of a strip."""
        return self.tokens * WARPGROUPS


def choose_prefill_tiles(
    *, num_tokens: int, rows: int, blocks: int, kv_heads: int, group: int, width: int, item_bytes: int
) -> PrefillTiles:
    """Choose sizes for an H200.

    Args:
        num_tokens: packed tokens of a call.
        rows: rows of a call.
        blocks: width of the block tables.
        kv_heads: KV heads.
        group: query heads that read the same KV head.
        width: width of a head.
        item_bytes: bytes of one stored number.
    """
    heads = min(group & -group, _TILE_HEADS)  # so that all 64 rows of a tile are queries, whatever the group
    head_tiles = group // heads
    strips = num_strips(num_tokens, rows, TILE_QUERIES // heads * WARPGROUPS)
    splits = 2 * strips * kv_heads * head_tiles <= _PROGRAMS  # else half of the multiprocessors have work without
    columns, plain_rows = min(64, width), 32
    tile = TILE_QUERIES * width * item_bytes
    # A part's result passes through float32 columns, a strip's through plain rows where another row's tokens lie in it.
    out_bytes = max(TILE_QUERIES * columns * 4, plain_rows * width * item_bytes)
    stages = (SHARED_BYTES - _OTHER_BYTES - WARPGROUPS * (tile + out_bytes)) // (2 * CHUNK * width * item_bytes)
    return PrefillTiles(
        heads=heads,
        head_tiles=head_tiles,
        stages=min(stages, _MAX_STAGES),
        columns=columns,
        plain_rows=plain_rows,
        parts=-(-blocks // _PART_PAGES) if splits else 1,
        part_pages=_PART_PAGES if splits else 0,
        attend_registers=232,
        load_registers=40,
    )


def parts_shape(tiles: PrefillTiles, num_tokens: int, rows: int, kv_heads: int) -> tuple[int, int, int, int]:
    """Return how many results there are where rows are split: of strips, tiles of heads, parts and queries."""
    strips = num_strips(num_tokens, rows, tiles.strip_tokens)
    return strips, kv_heads * tiles.head_tiles, tiles.parts, WARPGROUPS * TILE_QUERIES
