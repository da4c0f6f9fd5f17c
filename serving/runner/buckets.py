"""Padded sizes that steps are compiled for: few, so that start-up can compile them all.

Each size costs a compilation, seconds of every first start; each size that is missing costs padding in every step
that would have used it. With 16 requests, 2,048 prefill tokens and 262,144 tokens of context there are 20 steps: two
widths of block tables times

    prefill   64 x 1   512 x 1   1024 x 1   2048 x 1   512 x 8   1024 x 8   2048 x 8   (packed tokens x rows)
    advance   1   4   16                                                 (rows; 64 requests have one size more)

What that wastes. A call of 512 tokens takes little longer than reading the weights once, so up to there most of it may
be padding; above, where time goes with tokens, no more than half and a block is. Of rows up to three quarters
are padding. Eight rows have 14 more chunks in the delta rule than one, whatever their tokens: one row alone has calls
of its own; a few tokens in several rows run as 512. A wide block table costs its transfer (4 bytes per block and row),
since attention passes over what lies past a row's end: so widths grow by 16, from 256 blocks, which hold 16,384 tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Return sizes that grow by `factor` from `smallest`, ending in `largest` exactly.

    A size is left out where the largest is less than twice as big: padding costs less than one more compilation.
    """
    sizes: list[int] = []
    size = smallest
    while 2 * size <= largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def fit(sizes: Sequence[int], wanted: int) -> int:
    """Return the smallest size that holds `wanted`.

    Raises:
        ValueError: `wanted` is beyond the largest.
    """
    if wanted > sizes[-1]:
        raise ValueError(f"a size must be at most {sizes[-1]}; got {wanted}")
    return sizes[bisect_left(sizes, wanted)]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes of one engine.

    Attributes:
        prefill: packed tokens (a multiple of the block size) and rows of prefill calls, in the order they are tried;
            the last one is the largest of both.
        advance_rows: rows of a decode or verify call.
        table_blocks: width of the block tables a call sees.
    """

    prefill: tuple[tuple[int, int], ...]
    advance_rows: tuple[int, ...]
    table_blocks: tuple[int, ...]

    def prefill_size(self, num_tokens: int, num_rows: int) -> tuple[int, int]:
        """Return the first size that holds so many packed tokens and rows.

        Raises:
            ValueError: they are beyond the largest.
        """
        for tokens, rows in self.prefill:
            if num_tokens <= tokens and num_rows <= rows:
                return tokens, rows
        raise ValueError(f"a prefill call must be at most {self.prefill[-1]}; got {(num_tokens, num_rows)}")

    def prefill_shapes(self) -> Iterator["Buckets"]:
        """Yield every shape of a prefill call, as buckets of that one size."""
        for width in self.table_blocks:
            for size in self.prefill:
                yield Buckets(prefill=(size,), advance_rows=self.advance_rows, table_blocks=(width,))

    def advance_shapes(self) -> Iterator["Buckets"]:
        """Yield every shape of an advance call, as buckets of that one size."""
        for width in self.table_blocks:
            for num_rows in self.advance_rows:
                yield Buckets(prefill=self.prefill, advance_rows=(num_rows,), table_blocks=(width,))


MAX_PREFILL_ROWS = 8  # more rows of one step are run in further calls
NARROW_BLOCKS = 256  # of the narrowest block tables, where the context has as many
_FEW_TOKENS = 512  # up to which a call takes little longer than reading weights


def make_buckets(
    *, budget: int, max_num_seqs: int, max_model_len: int, block_size: int, deterministic: bool
) -> Buckets:
    """Choose the sizes.

    Args:
        budget: most prefill tokens in a step.
        max_num_seqs: most rows in a step.
        max_model_len: most tokens of a sequence.
        block_size: tokens per block.
        deterministic: one size per phase: every call has the same shapes, so that results do not depend on what else
            runs.
    """
    tokens = -(-budget // block_size) * block_size
    blocks = (max_model_len - 1) // block_size + 1  # the last token of a sequence is never run
    rows = min(MAX_PREFILL_ROWS, max_num_seqs)
    if deterministic:
        return Buckets(prefill=((tokens, rows),), advance_rows=(max_num_seqs,), table_blocks=(blocks,))
    sizes = _prefill_sizes(block_size, tokens)
    alone = {(size, 1) for size in sizes}
    together = {(size, rows) for size in (*sizes[1:], sizes[-1])}
    return Buckets(
        prefill=tuple(sorted(alone | together)),
        advance_rows=ladder(1, max_num_seqs, 4),
        table_blocks=ladder(NARROW_BLOCKS, blocks, 16),
    )


def _prefill_sizes(block_size: int, tokens: int) -> tuple[int, ...]:
    """Return packed tokens, the largest number last: halves of it down to some 512, below which few sizes do."""
    sizes = [tokens]
    while sizes[0] >= 2 * _FEW_TOKENS:
        sizes.insert(0, -(-sizes[0] // (2 * block_size)) * block_size)
    return (*ladder(block_size, sizes[0], 8), *sizes[1:])
