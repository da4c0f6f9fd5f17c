"""The longest usable hit: blocks known without a break, a state at exactly the end, and never the last token."""

import pytest

from gdn_jax.serving.core.blocks import BlockHash, BlockPool, HashChain
from gdn_jax.serving.core.checkpoints import NULL_SLOT, CheckpointStore, Retention
from gdn_jax.serving.core.prefix_cache import MISS, PrefixHit, lookup

SIZE = 4
TOKENS = list(range(40))


class Cache:
    """Pools filled by hand: which boundaries of TOKENS have a block, and which a state."""

    def __init__(self, *, known: int, states: tuple[int, ...]) -> None:
        self.chain = HashChain(b"", SIZE)
        self.store = CheckpointStore(12)
        self.pool = BlockPool(12, on_evict=self.store.evict)
        names = self.chain.upto(TOKENS, known)
        self.blocks = self.pool.try_take(len(names)) or []
        for block, name, parent in zip(self.blocks, names, [None, *names], strict=False):
            self.pool.publish(block, name, parent)
        self.pool.release(self.blocks)
        self.slots = {boundary: self._save(boundary) for boundary in states}

    def _save(self, boundary: int) -> int:
        slot = self.store.try_take()
        assert slot is not None
        self.store.publish(slot, self.chain.name(TOKENS, boundary), Retention.PLACED)
        return slot

    def lookup(self, num_tokens: int, tokens: list[int] | None = None) -> PrefixHit:
        chain = HashChain(b"", SIZE).upto(tokens or TOKENS, num_tokens)
        return lookup(chain, num_tokens - 1, blocks=self.pool, checkpoints=self.store, block_size=SIZE)


def test_an_empty_cache_is_a_miss() -> None:
    assert Cache(known=0, states=()).lookup(20) == MISS
    assert MISS.slot == NULL_SLOT


def test_a_hit_names_its_length_blocks_slot_and_name() -> None:
    cache = Cache(known=12, states=(4, 8))
    assert cache.lookup(20) == PrefixHit(
        length=8,
        blocks=tuple(cache.blocks[:2]),
        slot=cache.slots[8],
        name=cache.chain.name(TOKENS, 8),
        junction=12,
    )


@pytest.mark.parametrize("num_tokens", range(1, 20))
def test_the_last_token_is_always_left_to_run(num_tokens: int) -> None:
    hit = Cache(known=16, states=(4, 8, 12, 16)).lookup(num_tokens)
    assert hit.length == hit.junction == min((num_tokens - 1) // SIZE * SIZE, 16)


def test_blocks_without_a_state_are_no_hit_but_tell_where_the_sharing_ends() -> None:
    hit = Cache(known=12, states=()).lookup(20)
    assert (hit.length, hit.blocks, hit.slot, hit.name, hit.junction) == (0, (), NULL_SLOT, None, 12)


def test_a_state_without_its_blocks_is_no_hit() -> None:
    cache = Cache(known=12, states=(4, 8, 12))
    for _ in range(10):  # the nameless ones, then the tail of the chain: the states go with it
        cache.pool.try_take(1)
    hit = cache.lookup(20)
    assert (hit.length, hit.junction) == (4, 4)
    assert len(cache.store.names()) == 1


def test_a_missing_state_falls_back_to_the_deepest_one_there_is() -> None:
    cache = Cache(known=16, states=(4, 8, 16))
    cache.store.drop(cache.chain.name(TOKENS, 16))
    assert cache.lookup(30).length == 8
    cache.store.drop(cache.chain.name(TOKENS, 8))
    assert cache.lookup(30).length == 4


def test_other_text_after_the_shared_part_ends_the_hit() -> None:
    cache = Cache(known=16, states=(4, 8, 12, 16))
    hit = cache.lookup(20, [*TOKENS[:10], 99, *TOKENS[11:]])
    assert (hit.length, hit.junction) == (8, 8)


def test_text_inserted_in_the_middle_is_reused_only_up_to_there() -> None:
    cache = Cache(known=16, states=(4, 8, 12, 16))
    assert cache.lookup(20, [*TOKENS[:4], 90, 91, 92, 93, *TOKENS[4:]]).length == 4


def test_looking_changes_nothing() -> None:
    cache = Cache(known=16, states=(4, 8))
    before = (list(cache.pool._idle), cache.pool.references(), list(cache.store._placed), cache.store.names())
    cache.lookup(20)
    cache.lookup(3)
    assert before == (list(cache.pool._idle), cache.pool.references(), list(cache.store._placed), cache.store.names())


def test_a_chain_of_another_salt_finds_nothing() -> None:
    cache = Cache(known=16, states=(16,))
    chain = HashChain(b"other", SIZE).upto(TOKENS, 20)
    assert lookup(chain, 19, blocks=cache.pool, checkpoints=cache.store, block_size=SIZE) == MISS
    assert cache.pool.lookup([BlockHash(b"x")]) == []
