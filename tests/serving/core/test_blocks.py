"""Block hashes, and the pool: who holds what, which names are known, what is evicted next."""

from hashlib import sha256

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gdn_jax.serving.core import blocks
from gdn_jax.serving.core.blocks import NULL_BLOCK, BlockHash, BlockId, BlockPool, HashChain
from gdn_jax.serving.core.errors import InvariantError

A, AB, ABC, AD, X = (BlockHash(name) for name in (b"a", b"ab", b"abc", b"ad", b"x"))


def publish_path(pool: BlockPool, *names: BlockHash) -> list[BlockId]:
    """Take a block for each name, publish each under the one before it, and give all back."""
    taken = pool.try_take(len(names))
    assert taken is not None
    for block, name, parent in zip(taken, names, [None, *names], strict=False):
        pool.publish(block, name, parent)
    pool.release(taken)
    return taken


# Hashes.


def test_a_hash_is_the_sha256_of_its_parent_and_its_tokens_in_little_endian() -> None:
    tokens = [1, 2, 70_000, 4_000_000_000, 5]
    root = sha256(b"salt").digest()
    first = sha256(root + b"".join(token.to_bytes(4, "little") for token in tokens[:2])).digest()
    second = sha256(first + b"".join(token.to_bytes(4, "little") for token in tokens[2:4])).digest()
    assert HashChain(b"salt", 2).upto(tokens, 5) == [first, second]


def test_a_big_endian_host_finds_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = blocks.array("I", [1, 2])
    swapped.byteswap()  # as such a host would hold them
    monkeypatch.setattr(blocks.sys, "byteorder", "big")
    assert HashChain(b"", 2).upto(swapped, 2) == HashChain(b"", 2).upto([1 << 24, 2 << 24], 2)
    monkeypatch.undo()
    assert HashChain(b"", 2).upto([1, 2], 2) == [
        BlockHash(sha256(sha256(b"").digest() + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest())
    ]


def test_only_full_blocks_have_a_hash() -> None:
    chain = HashChain(b"", 4)
    assert [len(chain.upto(list(range(13)), count)) for count in (0, 3, 4, 7, 8, 13)] == [0, 0, 1, 1, 2, 3]


def test_a_chain_that_grows_token_by_token_names_what_one_made_at_once_names() -> None:
    tokens = [number * 7 % 11 for number in range(30)]
    grown = HashChain(b"", 4)
    for count in range(31):
        grown.upto(tokens[:count], count)
    assert grown.upto(tokens, 30) == HashChain(b"", 4).upto(tokens, 30)
    assert [grown.name(tokens, count) for count in range(4, 30, 4)] == grown.upto(tokens, 28)


def test_a_hash_covers_every_token_before_it_and_the_salt() -> None:
    tokens = list(range(12))
    name = HashChain(b"", 4).name(tokens, 12)
    for position in range(12):
        changed = [*tokens[:position], 99, *tokens[position + 1 :]]
        assert HashChain(b"", 4).name(changed, 12) != name
    assert HashChain(b"other", 4).name(tokens, 12) != name
    assert HashChain(b"", 4).name([*tokens, 7], 12) == name


def test_text_inserted_in_the_middle_shares_only_what_stands_before_it() -> None:
    before, after = [1] * 4, [2] * 4
    plain = HashChain(b"", 4).upto([*before, *after], 8)
    edited = HashChain(b"", 4).upto([*before, 9, 9, 9, 9, *after], 12)
    assert plain[0] == edited[0]
    assert not set(plain[1:]) & set(edited[1:])


# The pool.


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2, as block 0 is reserved; got 1"):
        BlockPool(1)


def test_the_null_block_is_never_lent() -> None:
    pool = BlockPool(4)
    assert sorted(pool.try_take(3) or []) == [1, 2, 3]
    assert pool.try_take(1) is None
    assert NULL_BLOCK == 0
    assert pool.num_usable == 3


def test_taking_more_than_is_idle_changes_nothing() -> None:
    ended: list[BlockHash] = []
    pool = BlockPool(4, on_evict=ended.append)
    publish_path(pool, A, AB)
    pool.hold(pool.lookup([A]))
    assert pool.try_take(3) is None
    assert pool.num_idle == 2
    assert pool.lookup([A, AB, ABC]) == list(pool.names().values())
    assert ended == []
    pool.check()


def test_an_idle_block_stays_a_hit_until_it_is_reused() -> None:
    pool = BlockPool(4)
    path = publish_path(pool, A, AB)
    assert pool.num_idle == 3
    assert pool.lookup([A, AB]) == path
    pool.try_take(1)  # the nameless one goes first
    assert pool.lookup([A, AB]) == path
    pool.try_take(1)  # the tail of the path goes before its head
    assert pool.lookup([A, AB]) == path[:1]


def test_eviction_takes_nameless_blocks_first_then_the_longest_unused_tails_first() -> None:
    pool = BlockPool(8)
    first = publish_path(pool, A, AB)
    second = publish_path(pool, X)
    spare = pool.try_take(4)
    assert spare is not None
    pool.release(spare)
    pool.hold(second)
    pool.release(second)  # used again: behind everything else
    pool.hold(first[:1])
    pool.release(first[:1])  # only the head is used again: the tail keeps its place
    order = [taken[0] for _ in range(7) if (taken := pool.try_take(1))]
    assert order == [*spare, first[1], second[0], first[0]]


def test_a_released_tail_is_evicted_before_its_prefix() -> None:
    pool = BlockPool(4)
    path = publish_path(pool, A, AB, ABC)
    assert [pool.try_take(1) for _ in range(3)] == [[path[2]], [path[1]], [path[0]]]


def test_a_block_held_twice_is_idle_only_after_the_second_release() -> None:
    pool = BlockPool(3)
    path = publish_path(pool, A)
    pool.hold(path)
    pool.hold(path)
    pool.release(path)
    assert pool.num_idle == 1
    assert pool.count_idle(path) == 0
    pool.release(path)
    assert pool.count_idle(path) == 1


def test_a_name_cut_off_from_its_root_ends_with_it_deepest_first() -> None:
    ended: list[BlockHash] = []
    pool = BlockPool(6, on_evict=ended.append)
    root, other = pool.try_take(1), pool.try_take(3)
    assert root is not None
    assert other is not None
    pool.publish(root[0], A, None)
    pool.publish(other[0], AB, A)
    pool.publish(other[1], ABC, AB)
    pool.publish(other[2], AD, A)
    pool.release(root)  # idle, while its extensions are held by another
    assert pool.try_take(2) is not None  # the nameless one, then the root
    assert ended == [ABC, AD, AB, A]
    assert pool.lookup([A, AB]) == []
    pool.check()
    assert pool.num_held() == 5
    pool.release(other)
    assert pool.try_take(3) is not None
    assert len(ended) == 4  # they had no names any more


def test_a_chain_that_broke_is_made_whole_by_publishing_it_again() -> None:
    pool = BlockPool(4)
    root = pool.try_take(1) or []
    own = pool.try_take(2) or []
    pool.publish(root[0], A, None)
    pool.publish(own[1], AB, A)
    pool.release(root)
    pool.try_take(1)
    assert pool.names() == {}
    pool.publish(own[0], A, None)
    pool.publish(own[1], AB, A)
    assert pool.lookup([A, AB]) == own


def test_a_name_that_is_known_keeps_its_block() -> None:
    pool = BlockPool(4)
    first, second = pool.try_take(2) or []
    pool.publish(first, A, None)
    pool.publish(second, A, None)
    assert pool.lookup([A]) == [first]
    pool.release([first, second])
    assert pool.try_take(2) == [second, BlockId(3)]  # the twin has nothing to lose
    assert pool.lookup([A]) == [first]


def test_forgetting_everything_leaves_references_alone() -> None:
    pool = BlockPool(4)
    publish_path(pool, A, AB)
    held = pool.lookup([A])
    pool.hold(held)
    pool.forget_all()
    assert pool.lookup([A]) == []
    assert pool.num_held() == 1
    pool.check()
    pool.release(held)
    assert pool.num_idle == 3


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (lambda pool: pool.publish(BlockId(1), A, None), "published while idle"),
        (lambda pool: (pool.try_take(1), pool.publish(BlockId(1), AB, A)), "before its parent"),
        (
            lambda pool: (pool.try_take(1), pool.publish(BlockId(1), A, None), pool.publish(BlockId(1), X, None)),
            "another name already",
        ),
        (lambda pool: pool.release([BlockId(1)]), "released more often than held"),
        (lambda pool: (pool.try_take(1), pool.release([BlockId(1), BlockId(1)])), "released more often than held"),
    ],
)
def test_a_slip_of_the_caller_is_refused(slip, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        slip(BlockPool(3))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool._idle.popitem(), "do not part the pool"),
        (lambda pool: pool._by_hash.pop(A), "tables disagree"),
        (lambda pool: pool._parent.pop(AB), "no parent entry"),
        (lambda pool: pool._children.pop(A), "parent is not known"),
        (lambda pool: pool._children.setdefault(AB, {}).update({ABC: None}), "names that are not known"),
    ],
)
def test_the_check_sees_books_that_are_wrong(break_it, message: str) -> None:
    pool = BlockPool(5)
    publish_path(pool, A, AB)
    pool.check()
    break_it(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check()


# A machine against a model made of plain dictionaries.

PATHS = [BlockHash(path) for path in (b"0", b"00", b"01", b"1", b"10", b"100", b"000", b"001")]


class BlockMachine(RuleBasedStateMachine):
    """Names are paths, so that a name's parent is the path without its last letter."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[BlockHash] = []
        self.pool = BlockPool(7, on_evict=self.ended.append)
        self.idle: list[BlockId] = [BlockId(number) for number in range(1, 7)]  # next victim first
        self.refs: dict[BlockId, int] = {}
        self.names: dict[BlockHash, BlockId] = {}
        self.holders: list[list[BlockId]] = []

    def _named(self, block: BlockId) -> list[BlockHash]:
        return [name for name, owner in self.names.items() if owner == block]

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        self.ended.clear()
        taken = self.pool.try_take(count)
        if count > len(self.idle):
            assert taken is None
            assert self.ended == []
            return
        assert taken is not None
        assert len(taken) == count
        expected: set[BlockHash] = set()
        for block in taken:
            nameless = [other for other in self.idle if not self._named(other)]
            assert block == self.idle[0] if not nameless else block in nameless
            self.idle.remove(block)
            self.refs[block] = 1
            for name in self._named(block):
                expected |= {other for other in self.names if other.startswith(name)}
                self.names = {other: owner for other, owner in self.names.items() if not other.startswith(name)}
        assert set(self.ended) == expected
        assert len(self.ended) == len(expected)
        assert all(  # an extension is told before what it extends
            not later.startswith(sooner) for at, sooner in enumerate(self.ended) for later in self.ended[at + 1 :]
        )
        self.holders.append(taken)

    @rule(data=st.data(), name=st.sampled_from(PATHS))
    def publish(self, data: st.DataObject, name: BlockHash) -> None:
        nameless = [block for block in sorted(self.refs) if not self._named(block)]
        if not nameless or (len(name) > 1 and name[:-1] not in self.names):
            return
        block = data.draw(st.sampled_from(nameless))
        self.pool.publish(block, name, BlockHash(name[:-1]) or None)
        self.names.setdefault(name, block)

    @rule(name=st.sampled_from(PATHS))
    def hold_what_is_known(self, name: BlockHash) -> None:
        chain = [BlockHash(name[:end]) for end in range(1, len(name) + 1)]
        run = [self.names[part] for part in chain if part in self.names]
        assert self.pool.lookup(chain) == run
        assert self.pool.count_idle(run) == sum(block in self.idle for block in run)
        self.pool.hold(run)
        for block in run:
            self.refs[block] = self.refs.get(block, 0) + 1
            if block in self.idle:
                self.idle.remove(block)
        self.holders.append(run)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                self.idle.append(block)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.names = {}

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.names() == self.names
        assert dict(self.pool.references()) == self.refs
        assert self.pool.num_idle == len(self.idle)
        named = [block for block in self.pool._idle if self._named(block)]
        assert named == [block for block in self.idle if self._named(block)]  # least recently used first


BlockMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestBlockMachine = BlockMachine.TestCase
