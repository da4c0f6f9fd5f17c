"""Padded sizes that steps are compiled for: few, so that start-up can compile them all."""

from bisect import bisect_left
from collections.abc import Sequence
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
        prefill_tokens: packed tokens of a prefill call, multiples of the block size.
        prefill_rows: rows of a prefill call.
        advance_rows: rows of a decode or verify call.
        table_blocks: width of the block tables a call sees.
    """

    prefill_tokens: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    advance_rows: tuple[int, ...]
    table_blocks: tuple[int, ...]


MAX_PREFILL_ROWS = 8  # more rows of one step are run in further calls


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
        return Buckets(
            prefill_tokens=(tokens,), prefill_rows=(rows,), advance_rows=(max_num_seqs,), table_blocks=(blocks,)
        )
    return Buckets(
        prefill_tokens=ladder(block_size, tokens, 4),
        prefill_rows=ladder(1, rows, MAX_PREFILL_ROWS),
        advance_rows=ladder(1, max_num_seqs, 4),
        table_blocks=ladder(64, blocks, 8),
    )
