"""One request: its tokens, its limits, how far it has come, and what it holds.

Plain data for the scheduler, which alone changes it. Counts derive from a few fields: a request's state slot holds
`folded` tokens, its replay window `num_replay` more, and every known token past those is still to be computed.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from gdn_jax.serving.core.blocks import BlockHash, BlockId, HashChain
from gdn_jax.serving.core.checkpoints import NULL_SLOT, SlotId

RequestId = NewType("RequestId", str)


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"  # holds nothing; new or preempted
    RUNNING = "running"  # holds a lane, a slot, blocks
    CLOSING = "closing"  # finished for its client; one more row folds its state to a boundary, or runs in vain already
    GONE = "gone"  # holds nothing and never comes back


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"
    ERROR = "error"


@dataclass(kw_only=True, eq=False, slots=True)
class Request:
    """A request as the core knows it: integers only.

    Attributes:
        request_id: unique among live requests.
        tokens: prompt, then output; grows at commit, never changes otherwise.
        num_prompt: how many of them are the prompt.
        max_tokens: most output tokens.
        seed: of its sampling noise.
        priority: lower goes first.
        arrival: orders requests of one priority; unique.
        turn_borders: token counts up to which the next turn of a conversation may share this prompt.
        chain: its block hashes.
        use_cache: false: no lookup, since every position of the prompt must be computed; true again once that is done.
        leader: a request whose prompt checkpoint this one waits for (siblings of n > 1).
        needs_history: whether the device must know all its tokens, those that come from the cache too.
    """

    request_id: RequestId
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    seed: int
    priority: int
    arrival: int
    turn_borders: tuple[int, ...]
    chain: HashChain
    use_cache: bool = True
    leader: RequestId | None = None
    needs_history: bool = False

    order: tuple[int, int] = field(init=False)  # the key requests are planned by
    status: Status = Status.WAITING
    lane: int = -1
    slot: SlotId = NULL_SLOT  # its running slot
    read_anchor: SlotId = NULL_SLOT  # where its state lies; only commit and admission change it
    pinned: SlotId | None = None  # the checkpoint it starts from, until the step that reads it commits
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    num_sent_blocks: int = 0  # of `blocks`, those the runner knows
    folded: int = 0
    num_replay: int = 0
    num_drafts: int = 0  # drafts at hand on the device
    has_pending: bool = False  # whether a row of this lane emitted the newest token, and so left its MTP entry
    placed: frozenset[int] = frozenset()  # boundaries of its prefill worth a placed checkpoint
    rolling: BlockHash | None = None  # its newest checkpoint made by a fold
    rolling_at: int = 0
    close_at: int = 0  # CLOSING: the boundary its state is folded to
    num_cached: int | None = None  # tokens of its first hit; None until admitted
    publishes: bool = True  # false after the cache was reset under it
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        """Derive the order once: it is asked for at every step."""
        self.order = self.priority, self.arrival

    @property
    def num_known(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def computed(self) -> int:
        """Tokens in the state at the read anchor and its replay window."""
        return self.folded + self.num_replay

    def forget_holdings(self) -> None:
        """Set every field about holdings to nothing; the books are the caller's.

        The rolling checkpoint is not held: it stays in the cache, and the next one still supersedes it.
        """
        self.lane, self.slot, self.read_anchor, self.pinned = -1, NULL_SLOT, NULL_SLOT, None
        self.blocks, self.num_sent_blocks = [], 0
        self.folded, self.num_replay, self.num_drafts, self.has_pending = 0, 0, 0, False
