"""What callers and the engine exchange: requests, what a step gave them, and counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.cut import TokenOutput
from gdn_jax.serving.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One completion of one prompt, checked by whoever made it.

    Attributes:
        request_id: never used before in this engine; whoever makes the request counts.
        prompt: token ids.
        params: how it samples and ends; `n` is the maker's business.
        seed: of its noise.
        max_tokens: most tokens it may emit.
        bad_words: the token sequences that `params.bad_words` stands for.
        priority: lower goes first.
        turn_borders: token counts up to which the next turn may share this prompt.
        cache_salt: shares cached prefixes only with requests of the same salt.
        leader: id of a request with the same prompt whose checkpoint it waits for.
        name: what its client calls it, for log lines; need not be unique.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    turn_borders: tuple[int, ...] = ()
    cache_salt: str = ""
    leader: str | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """What one step gave one request.

    Attributes:
        request_id: whose.
        output: tokens, text, logprobs, and the finish reason in the last one.
        num_cached_tokens: tokens of its prompt that came from the cache; None while it has not been admitted.
    """

    request_id: RequestId
    output: TokenOutput
    num_cached_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since start, and gauges now.

    Attributes:
        queried_tokens: tokens looked up in the prefix cache.
        hit_tokens: those that came from it.
        gap_tokens: known tokens computed again for their state.
        prefilled_tokens: tokens computed in prefill.
        output_tokens: tokens emitted and kept.
        saves: checkpoints published.
        saves_skipped: checkpoints that found no slot.
        evictions: checkpoints evicted.
        preemptions: requests that gave everything back.
        steps: steps run.
        failed_steps: steps that raised.
        compilations: steps compiled, one per phase and padded size.
        verified_rows: rows that ran drafts of the step before.
        drafted_tokens: drafts that they ran.
        accepted_tokens: drafts that stood and were kept.
        accepted_by_position: the same by place in the window, the first draft first.
        checkpoints: published now.
        blocks_used: held now, of `blocks`.
        blocks: KV blocks in all.
        slots_used: running, reserved or pinned now, of `slots`.
        slots: state slots in all.
        waiting: requests that hold nothing.
        running: requests that hold a lane.
        finished_requests: those that ended by themselves, at a stop or their length.
        aborted_requests: those that their clients left.
        failed_requests: those that ended with an error.
    """

    queried_tokens: int
    hit_tokens: int
    gap_tokens: int
    prefilled_tokens: int
    output_tokens: int
    saves: int
    saves_skipped: int
    evictions: int
    preemptions: int
    steps: int
    failed_steps: int
    checkpoints: int
    blocks_used: int
    blocks: int
    slots_used: int
    slots: int
    waiting: int
    running: int
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    compilations: int = 0
    verified_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @property
    def tokens_per_verify(self) -> float:
        """Tokens that a verifying row emits on average: accepted drafts and one more; 0 before the first of them."""
        return _per_verify(self.accepted_tokens, self.verified_rows)

    def tokens_per_verify_since(self, before: "EngineStats") -> float:
        """Return the same of the rows that verified between two moments."""
        return _per_verify(self.accepted_tokens - before.accepted_tokens, self.verified_rows - before.verified_rows)


def _per_verify(accepted_tokens: int, verified_rows: int) -> float:
    return 1 + accepted_tokens / verified_rows if verified_rows else 0.0


@dataclass(kw_only=True)
class EngineCounts:
    """What the engine itself counts; the scheduler knows the rest.

    Attributes:
        output_tokens: as all but the last here, those of `EngineStats`.
        steps: see there.
        failed_steps: see there.
        finished_requests: see there.
        aborted_requests: see there.
        failed_requests: see there.
        verified_rows: see there.
        drafted_tokens: see there.
        accepted_by_position: see there.
        evictions_before: checkpoints evicted from pools that were since given up.
    """

    output_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    verified_rows: int = 0
    drafted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list[int])
    evictions_before: int = 0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Count a row that ran drafts."""
        self.verified_rows += 1
        self.drafted_tokens += num_drafts
        for place in range(num_accepted):
            self.accepted_by_position[place] += 1

    def stats(self, scheduler: Scheduler, *, num_compiled: int) -> EngineStats:
        """Return these, the scheduler's, the runner's count of compiled steps, and gauges now."""
        counts, holdings = scheduler.counts, scheduler.holdings
        return EngineStats(
            queried_tokens=counts.queried_tokens,
            hit_tokens=counts.hit_tokens,
            gap_tokens=counts.gap_tokens,
            prefilled_tokens=counts.prefilled_tokens,
            output_tokens=self.output_tokens,
            saves=counts.saves,
            saves_skipped=counts.saves_skipped,
            evictions=self.evictions_before + holdings.checkpoints.num_evicted,
            preemptions=counts.preemptions,
            steps=self.steps,
            failed_steps=self.failed_steps,
            checkpoints=holdings.checkpoints.num_published,
            blocks_used=holdings.blocks.num_held(),
            blocks=holdings.blocks.num_usable,
            slots_used=holdings.checkpoints.num_owned,
            slots=holdings.checkpoints.num_usable,
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            finished_requests=self.finished_requests,
            aborted_requests=self.aborted_requests,
            failed_requests=self.failed_requests,
            compilations=num_compiled,
            verified_rows=self.verified_rows,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=sum(self.accepted_by_position),
            accepted_by_position=tuple(self.accepted_by_position),
        )
