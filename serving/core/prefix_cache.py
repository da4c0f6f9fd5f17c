"""The longest usable hit over blocks and checkpoints, as a value; looking changes nothing.

A hit needs attention KV for every token before it *and* the recurrent state at exactly its end, so it is the deepest
boundary with all its blocks known and a checkpoint published. Known blocks beyond it are the gap: computed again, for
their state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gdn_jax.serving.core.blocks import BlockHash, BlockId, BlockPool
from gdn_jax.serving.core.checkpoints import NULL_SLOT, CheckpointStore, SlotId


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixHit:
    """What is usable of a token sequence.

    Attributes:
        length: tokens in the hit's state; 0 for a miss.
        blocks: the blocks of those tokens.
        slot: the checkpoint; null for a miss.
        name: its name; None for a miss.
        junction: end of the known blocks below the cap; beyond `length` the difference is the gap.
    """

    length: int
    blocks: tuple[BlockId, ...]
    slot: SlotId
    name: BlockHash | None
    junction: int


MISS = PrefixHit(length=0, blocks=(), slot=NULL_SLOT, name=None, junction=0)


def lookup(
    chain: Sequence[BlockHash], cap: int, *, blocks: BlockPool, checkpoints: CheckpointStore, block_size: int
) -> PrefixHit:
    """Find the longest hit of at most `cap` tokens.

    Args:
        chain: hashes of the sequence's full blocks.
        cap: known tokens - 1: the last token is always run, since its logits are wanted.
        blocks: the block names.
        checkpoints: the checkpoint names.
        block_size: tokens per block.
    """
    run = blocks.lookup(chain[: cap // block_size])
    for count in range(len(run), 0, -1):
        name = chain[count - 1]
        if (slot := checkpoints.lookup(name)) is not None:
            return PrefixHit(
                length=count * block_size,
                blocks=tuple(run[:count]),
                slot=slot,
                name=name,
                junction=len(run) * block_size,
            )
    return PrefixHit(length=0, blocks=(), slot=NULL_SLOT, name=None, junction=len(run) * block_size)
