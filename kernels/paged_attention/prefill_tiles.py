"""How the work of the Mosaic prefill attention is cut: heads and tokens of a query tile, stages, parts of a row.

All of it follows from static sizes. Where rows are split into parts, which only few tokens are, parts begin at fixed
multiples of pages: so neither neighbours nor the cut of a prompt into spans of one size change a bit of a row.
"""

from dataclasses import dataclass

from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.strips import num_strips
from gdn_jax.kernels.paged_attention.tiles import SHARED_BYTES, TILE_QUERIES, WIDTHS

WARPGROUPS = 2  # that multiply; registers hold no third tile's result 256 wide
MAX_GROUP = 16  # query heads that read one KV head
_TILE_HEADS = 8  # at most: a copy brings a multiple of eight tokens of a head
_OTHER_BYTES = 3072  # of shared memory, for barriers and alignment
_PROGRAMS = 132  # programs that run at once on an H200, one on each of its multiprocessors
_MAX_STAGES = 4
_PART_PAGES = 32  # a part lasts some 40 us, ten times what it takes to start and to end one


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """Sizes of the prefill kernel; a *part* is a run of pages that one program reads for one strip and KV head.

    A tile of 64 queries holds `heads` runs of `tokens` tokens, one for each query head; the rest of it is not used.
    """

    heads: int  # query heads of a tile
    tokens: int  # of each head in a tile: 8, 16, 32 or 64
    head_tiles: int  # tiles that the heads of one KV head take: 1, or 2, each then for the same tokens
    stages: int  # pages of keys, and as many of values, that shared memory holds
    columns: int  # columns of the values that are cleared, and of a part's result that are stored, at once
    plain_rows: int  # rows of a tile that are stored token by token at once
    parts: int  # of a row, if `part_pages` is not 0
    part_pages: int  # pages of a part, or 0 where no row is split
    attend_registers: int  # of a thread that multiplies
    load_registers: int  # of a thread that loads

    def __post_init__(self) -> None:
        if self.tokens % 8 or self.tokens & (self.tokens - 1) or self.heads * self.tokens > TILE_QUERIES:
            raise ValueError(
                f"a tile holds a power of two of tokens, at least 8, and {TILE_QUERIES} queries in all; got {self}"
            )
        if min(self.stages, self.parts, self.heads) < 1 or self.head_tiles not in (1, WARPGROUPS):
            raise ValueError(f"stages, parts and heads must be at least 1, head_tiles 1 or {WARPGROUPS}; got {self}")

    @property
    def strip_tokens(self) -> int:
        """Tokens of a strip."""
        return self.tokens * WARPGROUPS // self.head_tiles


def check_prefill(*, width: int, block_size: int, group: int) -> None:
    """Raise UnsupportedKernelError unless the Mosaic prefill attention can run these sizes.

    Args:
        width: of a head.
        block_size: tokens of a page.
        group: query heads that read the same KV head.
    """
    for fits, rule, value in (
        (width in WIDTHS, f"heads must be {', '.join(map(str, WIDTHS))} wide", width),
        (block_size == CHUNK, f"pages must hold {CHUNK} tokens", block_size),
        (
            group <= _TILE_HEADS or (group <= MAX_GROUP and group % 2 == 0),
            f"query heads per KV head must be at most {_TILE_HEADS}, or even and at most {MAX_GROUP}",
            group,
        ),
    ):
        if not fits:
            raise UnsupportedKernelError(f"{rule} for the Mosaic prefill attention; got {value}; ask for kernels='jax'")


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
    head_tiles = 1 if group <= _TILE_HEADS else WARPGROUPS
    heads = group // head_tiles
    tokens = 1 << (TILE_QUERIES // heads).bit_length() - 1
    columns, plain_rows = min(64, width), 32
    tile = TILE_QUERIES * width * item_bytes
    # A part's result passes through float32 columns, a strip's through plain rows where another row's tokens lie in it.
    out_bytes = max(TILE_QUERIES * columns * 4, plain_rows * width * item_bytes)
    stages = (SHARED_BYTES - _OTHER_BYTES - WARPGROUPS * (tile + out_bytes)) // (2 * CHUNK * width * item_bytes)
    strips = num_strips(num_tokens, rows, tokens * WARPGROUPS // head_tiles)
    splits = 2 * strips * kv_heads <= _PROGRAMS  # else half of the multiprocessors have work without
    return PrefillTiles(
        heads=heads,
        tokens=tokens,
        head_tiles=head_tiles,
        stages=min(stages, _MAX_STAGES),
        columns=columns,
        plain_rows=plain_rows,
        parts=-(-blocks // _PART_PAGES) if splits else 1,
        part_pages=_PART_PAGES if splits else 0,
        attend_registers=232,
        load_registers=40,
    )
