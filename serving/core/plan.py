"""What crosses between host and device: StepPlan down, StepResult up. Frozen, made of integers.

A plan is complete: with the parameters and the device state it determines the step. It takes resources but publishes
nothing; `Scheduler.commit` does that, after the step that wrote the data.

What exists once per row and step is a named tuple, made by keyword: a frozen dataclass takes up to four times as long
to make (docs/decisions/0003-rows-are-named-tuples.md).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gdn_jax.serving.core.blocks import BlockId
from gdn_jax.serving.core.checkpoints import Retention, SlotId
from gdn_jax.serving.core.request import FinishReason, RequestId

NEWEST = -1  # stands for the token that a row's lane emitted last, where the host has not seen it yet


class Phase(StrEnum):
    """Which step function runs a row: shapes and kernels differ there, the bookkeeping does not."""

    PREFILL = "prefill"  # many tokens
    DECODE = "decode"  # the pending token, or none at all in a closing row
    VERIFY = "verify"  # the pending token and its drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A state to store in a reserved slot while the row runs."""

    boundary: int  # absolute token count, a multiple of the block size, inside the span or the fold
    slot: SlotId
    retention: Retention  # how it will be published; the next rolling one of the request supersedes a rolling one


class RowPlan(NamedTuple):
    """One request's place in one step."""

    request_id: RequestId
    phase: Phase
    tokens: tuple[int, ...]  # the span: known tokens, or the pending token (or NEWEST); empty in a closing row
    num_drafts: int  # drafts of the previous step that are verified here; they stay on the device
    emits: bool  # false while known tokens remain to be computed, and in a closing row
    start: int  # position of the first token; equals folded tokens + num_replay
    num_replay: int  # tokens of the replay window to fold first; 0 in prefill
    lane: int  # index of the device buffers that follow the request
    table_start: int  # where in the lane's block table `new_blocks` go; 0 replaces the table
    new_blocks: tuple[BlockId, ...]  # the table then covers one position beyond the last one run
    read_anchor: SlotId  # the state before the span: own slot or a checkpoint; null for the zero state
    write_anchor: SlotId  # prefill: the state after the span; otherwise the state after the fold
    exports: tuple[Export, ...]
    seed: int  # of the request; the step folds in the position
    history: tuple[int, ...] = ()  # prompt and output, in a lane's first row, where the request needs them

    @property
    def end(self) -> int:
        """Tokens of the sequence that have been run after this step, drafts included."""
        return self.start + len(self.tokens) + self.num_drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All rows of one step, in (priority, arrival) order."""

    index: int
    rows: tuple[RowPlan, ...]

    def __str__(self) -> str:
        """One line: a saved list of these replays a bug."""
        parts = [
            f"{row.request_id}:{row.phase}[{row.start}:{row.end}]"
            f"+{row.num_replay} {row.read_anchor}>{row.write_anchor}"
            + "".join(f" @{export.boundary}>{export.slot}" for export in row.exports)
            for row in self.rows
        ]
        return f"step {self.index}: " + ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, before temperature and filters."""

    chosen: float
    rank: int  # of the chosen token, from 1
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


class RowResult(NamedTuple):
    """What the device says of one row."""

    tokens: tuple[int, ...]  # emitted: accepted drafts and one more; none if the row does not emit, or is to run again
    saved: tuple[int, ...]  # boundaries whose states were stored
    num_drafts: int = 0  # drafts made for the next step
    finite: bool = True  # false: the logits after the span hold NaN or infinities; nothing the row wrote may be kept
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, when some row of the step asked for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from start + 1 on, where they are wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the device says of a step, row by row."""

    rows: tuple[RowResult, ...]


class RowCut(NamedTuple):
    """Where a row ends: how many of its emitted tokens stand, and why it finishes, if it does."""

    num_kept: int
    finish: FinishReason | None = None
