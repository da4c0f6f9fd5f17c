"""Block hashes, and the pool that lends blocks out.

A block is `block_size` consecutive tokens of one sequence, counted from position 0. Its hash covers its own tokens and,
through its parent's hash, every token before it: equal hash, equal prefix. BlockPool is the only owner of reference
counts and of block names. It knows nothing of states: what else depends on a name learns of its end through `on_evict`.

The known names are closed under prefixes: a block is known only while its parent is. So the known part of a chain is a
leading run, and a name that an eviction cuts off from its root goes with it.
"""

import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import NewType

from gdn_jax.serving.core.errors import InvariantError

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
NULL_BLOCK = BlockId(0)  # padding points here, so no sequence may own it


class HashChain:
    """The block hashes of one growing sequence: one 32-byte SHA-256 per full block, opened by a salt.

    Only full blocks have a hash: a shorter tail can still grow. Equal across processes for equal salt and tokens.
    """

    def __init__(self, salt: bytes, block_size: int) -> None:
        """Open an empty chain.

        Args:
            salt: separates prefixes that must never be shared (weights revision, cache salt, adapter).
            block_size: tokens per block.
        """
        self._root = BlockHash(sha256(salt).digest())
        self._block_size = block_size
        self._hashes: list[BlockHash] = []

    def upto(self, tokens: Sequence[int], num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the full blocks within the first `num_tokens` of `tokens`, computing what is new.

        `tokens` must extend what earlier calls saw.
        """
        self._grow(tokens, num_tokens)
        return self._hashes[: num_tokens // self._block_size]

    def name(self, tokens: Sequence[int], num_tokens: int) -> BlockHash:
        """Return the hash of the block that ends at the boundary `num_tokens`, which names the state there too."""
        index = num_tokens // self._block_size - 1
        if index >= len(self._hashes):  # at most steps, of every row, it is known
            self._grow(tokens, num_tokens)
        return self._hashes[index]

    def _grow(self, tokens: Sequence[int], num_tokens: int) -> None:
        size, hashes = self._block_size, self._hashes
        for start in range(len(hashes) * size, num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else self._root
            words = array("I", tokens[start : start + size])
            hashes.append(BlockHash(sha256(parent + _little_endian(words)).digest()))


def _little_endian(words: "array[int]") -> bytes:
    if sys.byteorder == "big":  # such a host must find the same names
        words.byteswap()
    return words.tobytes()


class BlockPool:
    """Lends block ids. Each id but NULL_BLOCK is held (refs > 0) or idle (refs == 0).

    An idle block keeps its name, and so stays a prefix hit, until `try_take` reuses it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockHash], None] = lambda name: None) -> None:
        """Create a pool in which every block is idle and nameless.

        Args:
            num_blocks: ids 0..num_blocks - 1, the null block included.
            on_evict: called with each name that ends by eviction.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, as block 0 is reserved; got {num_blocks}")
        self._num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs: Counter[BlockId] = Counter()
        self._idle = OrderedDict.fromkeys(BlockId(i) for i in range(1, num_blocks))  # next victim first
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._parent: dict[BlockHash, BlockHash | None] = {}
        self._children: dict[BlockHash, dict[BlockHash, None]] = {}  # ordered: replicas of this pool must agree

    @property
    def num_usable(self) -> int:
        """Blocks that a request may ever own."""
        return self._num_blocks - 1

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds."""
        return len(self._idle)

    def count_idle(self, blocks: Iterable[BlockId]) -> int:
        """Return how many of `blocks` nobody holds: holding them takes that many from `num_idle`."""
        return sum(block in self._idle for block in blocks)

    def is_known(self, name: BlockHash) -> bool:
        """Return whether a block has this name."""
        return name in self._by_hash

    def lookup(self, chain: Iterable[BlockHash]) -> list[BlockId]:
        """Return the blocks of the leading run of `chain` that is known; holds nothing, changes nothing."""
        run: list[BlockId] = []
        for name in chain:
            if (block := self._by_hash.get(name)) is None:
                break
            run.append(block)
        return run

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of `blocks`, as found by a `lookup` with no `try_take` since."""
        for block in blocks:
            self._idle.pop(block, None)
            self._refs[block] += 1

    def try_take(self, count: int) -> list[BlockId] | None:
        """Lend `count` blocks that have no name; None, and no change, if fewer are idle."""
        if count > len(self._idle):
            return None
        taken: list[BlockId] = []
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            self._refs[block] = 1
            if (name := self._hash_of.get(block)) is not None:
                self._forget(name)
            taken.append(block)
        return taken

    def publish(self, block: BlockId, name: BlockHash, parent: BlockHash | None) -> None:
        """Make a full, computed, held block findable; a name that is already known keeps its block.

        Args:
            block: held, and nameless unless it already has this name.
            name: its hash.
            parent: the hash of the block before it, known; None for a sequence's first block.
        """
        if self._refs[block] == 0:
            raise InvariantError(f"block {block} is published while idle")
        if parent is not None and parent not in self._by_hash:
            raise InvariantError(f"block {block} is published before its parent")
        if name in self._by_hash:
            return
        if block in self._hash_of:
            raise InvariantError(f"block {block} has another name already")
        self._by_hash[name], self._hash_of[block], self._parent[name] = block, name, parent
        if parent is not None:
            self._children.setdefault(parent, {})[name] = None

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give one reference back per block, tail first, so that a prefix outlives its extensions."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise InvariantError(f"block {block} is released more often than held")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                del self._refs[block]
                self._idle[block] = None
                if block not in self._hash_of:
                    self._idle.move_to_end(block, last=False)  # nothing to lose: reuse it first

    def forget_all(self) -> None:
        """End every name; nothing is a prefix hit any more. References stay as they are."""
        self._by_hash.clear()
        self._hash_of.clear()
        self._parent.clear()
        self._children.clear()

    def _forget(self, name: BlockHash) -> None:
        """End a name and those of all its extensions, deepest last found first told."""
        doomed = [name]
        for found in doomed:  # grows while it is walked
            doomed.extend(self._children.pop(found, ()))
        for gone in reversed(doomed):
            parent = self._parent.pop(gone)
            if parent is not None and (siblings := self._children.get(parent)) is not None:
                siblings.pop(gone, None)
                if not siblings:
                    del self._children[parent]
            block = self._by_hash.pop(gone)
            del self._hash_of[block]
            if block in self._idle:
                self._idle.move_to_end(block, last=False)
            self._on_evict(gone)

    def names(self) -> dict[BlockHash, BlockId]:
        """Return a copy of the known names, for audits."""
        return dict(self._by_hash)

    def parent_of(self, name: BlockHash) -> BlockHash | None:
        """Return the parent of a known name; None for a sequence's first block."""
        return self._parent[name]

    def references(self) -> Counter[BlockId]:
        """Return a copy of the reference counts, for audits."""
        return self._refs.copy()

    def num_held(self) -> int:
        """Return how many blocks somebody holds."""
        return len(self._refs)

    def check(self) -> None:
        """Raise InvariantError unless each block is in one state, the tables mirror, and names are prefix-closed."""
        held = set(self._refs)
        if sorted([*held, *self._idle]) != list(range(1, self._num_blocks)):
            raise InvariantError(f"held {sorted(held)} and idle {sorted(self._idle)} do not part the pool")
        if {known: block for block, known in self._hash_of.items()} != self._by_hash:
            raise InvariantError("block-to-hash and hash-to-block tables disagree")
        if set(self._parent) != set(self._by_hash):
            raise InvariantError("a known name has no parent entry, or the other way round")
        for name, parent in self._parent.items():
            if parent is not None and (parent not in self._by_hash or name not in self._children.get(parent, ())):
                raise InvariantError("a known name's parent is not known")
        if sum(map(len, self._children.values())) != sum(parent is not None for parent in self._parent.values()):
            raise InvariantError("the children table holds names that are not known")
