"""The loop: plan, build, run, cut, commit, emit. One thread owns it.

Engine composes the scheduler (host books), the runner (device) and one Cutter per request (text and stop rules). It
says nothing to anybody: `step()` returns what each request got, and the Python API, the async engine and the server
pass it on.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from gdn_jax.serving.core.errors import DeviceError, InvalidParameterError, InvariantError
from gdn_jax.serving.core.plan import RowCut, RowPlan, RowResult, StepPlan, StepResult, TokenLogprobs
from gdn_jax.serving.core.request import FinishReason, Request, RequestId
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.cut import Cutter, TokenOutput
from gdn_jax.serving.engine_types import EngineCounts, EngineOutput, EngineRequest, EngineStats
from gdn_jax.serving.interrupts import second_interrupt_passes
from gdn_jax.serving.runner.adjust import RowAdjustments
from gdn_jax.serving.runner.audit import Auditor, AuditSequence
from gdn_jax.serving.runner.lanes import MAX_BANNED
from gdn_jax.serving.runner.prompt_scores import ScoredPrompt
from gdn_jax.serving.runner.runner import LaunchedStep, RequestSampling, Runner
from gdn_jax.serving.runner.sampling import RowSampling
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Live:
    """What the engine keeps of a request that has not ended for its client."""

    cutter: Cutter
    name: str
    prompt_logprobs: list[TokenLogprobs] | None  # so far, of the second token on; None: not asked for, or handed on

    def take_prompt(self, row: RowPlan, result: RowResult) -> None:
        """Keep what a span says of the prompt. A preempted request starts again at 0, and nothing is kept twice."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs[row.start :] = result.prompt_logprobs

    def hand_over_prompt(self) -> list[TokenLogprobs] | None:
        """Return what was kept of the prompt, once: with the first token, when the prompt is all computed."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        return found


class Engine:
    """Runs requests; see the module docstring."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        tokenizer: Tokenizer | None,
        end_token_ids: Sequence[int],
        auditor: Auditor | None = None,
        async_scheduling: bool = False,
    ) -> None:
        """Compose an engine.

        Args:
            scheduler: the books; its limits are the runner's.
            runner: the device.
            tokenizer: None when text is neither read nor made.
            end_token_ids: the model's end tokens.
            auditor: of the runner's pools; checks them after every step, which is slow.
            async_scheduling: whether a step is handed to the device before the one before it has come back, where it
                can be planned by then.
        """
        self._scheduler, self._runner = scheduler, runner
        self._auditor = auditor
        self._tokenizer, self._end_token_ids = tokenizer, tuple(end_token_ids)
        self._live: dict[RequestId, _Live] = {}
        self._async_scheduling = async_scheduling
        self._launched: LaunchedStep | None = None  # planned ahead: on the device, and not yet waited for
        self._counts = EngineCounts(accepted_by_position=[0] * scheduler.limits.num_drafts)
        self._has_state = True  # false: a step lost the device state and it could not be made again

    def add(self, asked: EngineRequest) -> None:
        """Queue one completion of one prompt.

        Raises:
            RequestError: the id is in use, or it could never run to its end here.
            DeviceError: the device state is lost; see `step`.
        """
        self._check_state()
        params, prompt, request_id = asked.params, asked.prompt, RequestId(asked.request_id)
        # Made first: what the scheduler has queued must not lack them.
        sampling = self._sampling(asked)
        cutter = Cutter(params, prompt, asked.max_tokens, tokenizer=self._tokenizer, end_token_ids=self._end_token_ids)
        self._scheduler.add(
            request_id,
            prompt,
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            priority=asked.priority,
            turn_borders=asked.turn_borders,
            cache_salt=asked.cache_salt.encode(),
            use_cache=params.prompt_logprobs is None,  # a token that is not computed has no log probability
            leader=None if asked.leader is None else RequestId(asked.leader),
            needs_history=sampling.adjustments.adjusts,
        )
        kept = None if params.prompt_logprobs is None else list[TokenLogprobs]()
        self._live[request_id] = _Live(cutter=cutter, name=asked.name, prompt_logprobs=kept)
        self._runner.add(request_id, sampling)

    def _sampling(self, asked: EngineRequest) -> RequestSampling:
        """Return how a request samples, in numbers that fit the device's."""
        params, banned = asked.params, self._banned_ids(asked.params)
        adjustments = RowAdjustments(
            presence=float(params.presence_penalty),
            frequency=float(params.frequency_penalty),
            repetition=float(params.repetition_penalty),
            biases=tuple((int(token_id), float(bias)) for token_id, bias in (params.logit_bias or {}).items()),
            bad_words=asked.bad_words,
        )
        self._check_some_token_is_left({*banned, *(word[-1] for word in asked.bad_words)}, params)
        row = RowSampling(
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=asked.seed,
            banned=banned,
            banned_until=len(asked.prompt) + min(params.min_tokens, asked.max_tokens),
        )
        scored = None
        if params.prompt_logprobs is not None:
            scored = ScoredPrompt(token_ids=asked.prompt, num_top=params.prompt_logprobs)
        return RequestSampling(
            row=row,
            num_logprobs=params.logprobs,
            scored_prompt=scored,
            adjustments=adjustments,
            num_prompt=len(asked.prompt),
        )

    def _banned_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that would end a request, which it must not draw below `min_tokens`."""
        if params.min_tokens == 0:
            return ()
        ends = () if params.ignore_eos else self._end_token_ids
        banned = tuple(dict.fromkeys([*ends, *(params.stop_token_ids or ())]))
        if len(banned) > MAX_BANNED:
            raise InvalidParameterError(
                f"stop_token_ids and end tokens must be at most {MAX_BANNED} with min_tokens; got {len(banned)}; "
                "name fewer, or leave min_tokens out",
                parameter="stop_token_ids",
            )
        return banned

    def _check_some_token_is_left(self, refused: set[int], params: SamplingParams) -> None:
        """Refuse what might ban every token: ends of bad words count whatever stands before them."""
        if self._tokenizer is None or not refused.issuperset(range(self._tokenizer.num_tokens)):
            return
        raise InvalidParameterError(
            f"bad_words, and stop_token_ids and end tokens with min_tokens, must leave a token to draw; got all "
            f"{self._tokenizer.num_tokens}; name fewer, or leave min_tokens out",
            parameter="bad_words" if params.bad_words else "stop_token_ids",
        )

    def abort(self, request_id: str) -> bool:
        """Drop a request for good; returns whether it was live. It gets no further output."""
        was_live = self.withdraw(request_id)
        self._counts.aborted_requests += was_live
        return was_live

    def withdraw(self, request_id: str) -> bool:
        """Do as `abort` does and count nothing: for a request whose call was refused, so that no client left it."""
        was_live = self._scheduler.abort(RequestId(request_id))
        if was_live:
            self._forget(RequestId(request_id))
        return was_live

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._scheduler.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    @property
    def has_step_in_flight(self) -> bool:
        """Whether the device was handed a step that the next `step` waits for."""
        return self._launched is not None

    @property
    def has_closing_rows(self) -> bool:
        """Whether a request that ended still waits for the row that saves its last state; the next step runs it."""
        return self._scheduler.num_waiting + self._scheduler.num_running > len(self._live)

    def step(self) -> list[EngineOutput]:
        """Run one step; returns what each row's request got.

        A step that raises on the device fails its rows (finish reason ERROR), requeues the other running requests with
        their tokens, and starts with empty pools and cache again. One that is interrupted on the device (Ctrl-C)
        requeues all of them and passes the interrupt on. Everywhere else an interrupt would leave the books
        half-written: a caller on the main thread holds them (`held_interrupts`), here and around every other call.

        Raises:
            InvariantError: a bug of ours; the engine cannot go on.
            DeviceError: a step lost the device state and there is no memory to make it again; the engine cannot go on,
                and no request has been told.
        """
        self._check_state()
        try:
            return self._step()
        except InvariantError:
            self._launched = None  # nobody is to commit it: the books contradict themselves
            raise

    def _step(self) -> list[EngineOutput]:
        launched, self._launched = self._launched, None
        plan = self._scheduler.plan() if launched is None else launched.plan
        if plan is None:
            if self._scheduler.has_work:
                raise InvariantError("requests are left, and none of them can go on")
            return []
        ahead = self._scheduler.plan_ahead() if self._async_scheduling else None
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("%s", plan)
        self._counts.steps += 1
        is_ahead_lost = False
        try:
            with second_interrupt_passes():  # a device that hangs can be left; books that are open cannot
                launched = launched or self._runner.launch(plan)
                if ahead is not None:
                    is_ahead_lost = not self._try_launch(ahead)
                result = self._runner.collect(launched)
        except InvariantError:  # nothing of the device's
            raise
        except Exception:  # whatever the device or its compiler says
            _LOG.exception("a step failed: its requests end, pools and cache start afresh (%s)", plan)
            return self._fail(plan)
        except BaseException:  # an interrupt is nobody's fault, and the state it may have caught half-written is lost
            self._start_afresh(plan, ends_rows=False)
            raise
        outputs = self._commit(plan, result, has_state=not is_ahead_lost)
        return [*outputs, *self._fail(ahead)] if ahead is not None and is_ahead_lost else outputs

    def _try_launch(self, ahead: StepPlan) -> bool:
        """Launch a step planned ahead; False if that lost the state, while what the one before it emits may be had."""
        try:
            self._launched = self._runner.launch(ahead)
        except InvariantError:
            raise
        except Exception:
            _LOG.exception("a step failed: its requests end, pools and cache start afresh (%s)", ahead)
            return False
        return True

    def _commit(self, plan: StepPlan, result: StepResult, *, has_state: bool) -> list[EngineOutput]:
        cuts: list[RowCut] = []
        outputs: list[EngineOutput] = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            cut, output = self._cut(row, row_result)
            self._counts.output_tokens += cut.num_kept
            cuts.append(cut)
            if output is not None:
                outputs.append(self._output(row, output))
        auditor = self._auditor if has_state else None
        ran = [self._scheduler.get(row.request_id) for row in plan.rows] if auditor is not None else []
        for request in self._scheduler.commit(plan, result, cuts):
            self._end(request)
        if auditor is not None:
            self._audit(auditor, ran)
        return outputs

    def _cut(self, row: RowPlan, result: RowResult) -> tuple[RowCut, TokenOutput | None]:
        """Say where a row ends, and what its client gets, if anything."""
        live = self._live.get(row.request_id)
        if live is None and row.emits:  # aborted, or ended by the step before: it has run in vain
            return RowCut(num_kept=0), None
        if not result.finite:  # whatever the row was for, its state and pages may hold NaN: commit publishes neither
            _LOG.error(
                "request %s (%r): the model's numbers are not finite at tokens %d to %d; it ends here",
                row.request_id, live.name if live is not None else "ended", row.start, row.end,
            )  # fmt: skip
            return RowCut(num_kept=0, finish=FinishReason.ERROR), None if live is None else live.cutter.fail()
        if live is not None:
            live.take_prompt(row, result)
        if live is None or not row.emits:  # a closing row, or more prompt to come
            return RowCut(num_kept=0), None
        if not result.tokens:  # its drafts spoilt the step, and are not said to have been rejected
            return RowCut(num_kept=0), None
        cut, output = live.cutter.cut(result.tokens)
        output.prompt_logprobs = live.hand_over_prompt()
        output.logprobs = list(result.logprobs[: cut.num_kept])
        if row.num_drafts:  # all tokens but the last that the device emits are drafts; those past the cut are not sent
            output.num_accepted = min(cut.num_kept, len(result.tokens) - 1)
            output.num_rejected = row.num_drafts - output.num_accepted
            self._counts.verified(row.num_drafts, output.num_accepted)
        return cut, output

    def _audit(self, auditor: Auditor, ran: Sequence[Request]) -> None:
        """Check every owner's books and every published checkpoint and block.

        Raises:
            InvariantError: one of them is wrong.
        """
        self._scheduler.check()
        holdings = self._scheduler.holdings
        auditor.check(
            [
                AuditSequence(
                    tokens=tuple(request.tokens),
                    names=tuple(request.chain.upto(request.tokens, request.num_known)),
                )
                for request in ran
            ],
            checkpoints=holdings.checkpoints.names().items(),
            blocks=holdings.blocks.names().items(),
        )

    def _output(self, row: RowPlan, output: TokenOutput) -> EngineOutput:
        cached = self._scheduler.get(row.request_id).num_cached
        return EngineOutput(request_id=row.request_id, output=output, num_cached_tokens=cached)

    def _fail(self, plan: StepPlan) -> list[EngineOutput]:
        self._counts.failed_steps += 1
        outputs: list[EngineOutput] = []
        for request in self._start_afresh(plan, ends_rows=True):
            live = self._live.get(request.request_id)
            if live is not None and request.finish is FinishReason.ERROR:
                outputs.append(
                    EngineOutput(
                        request_id=request.request_id, output=live.cutter.fail(), num_cached_tokens=request.num_cached
                    )
                )
            self._end(request)
        return outputs

    def _start_afresh(self, plan: StepPlan, *, ends_rows: bool) -> list[Request]:
        """Give up a step and what it wrote to; returns the requests that end with it.

        The device comes first: if it has no memory for new pools, the books stay as they were and nothing goes on.
        """
        self._has_state = False
        self._launched = None
        try:
            self._runner.reset()
        except Exception as error:
            raise DeviceError(
                f"a step lost the device state, and it could not be made again: {error}; free memory on the device "
                "and start another engine"
            ) from error
        self._has_state = True
        self._counts.evictions_before += self._scheduler.holdings.checkpoints.num_evicted
        ended = self._scheduler.fail(plan, ends_rows=ends_rows)
        if self._auditor is not None:
            self._auditor.forget()
        return ended

    def _check_state(self) -> None:
        if not self._has_state:
            raise DeviceError("the engine has lost its device state and cannot go on; start another one")

    def _end(self, request: Request) -> None:
        """Count a request that the scheduler says has ended, and forget it."""
        self._counts.failed_requests += request.finish is FinishReason.ERROR
        self._counts.finished_requests += request.finish in (FinishReason.STOP, FinishReason.LENGTH)
        self._forget(request.request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._runner.forget(request_id)

    def stats(self) -> EngineStats:
        """Return counts since start and gauges now."""
        return self._counts.stats(self._scheduler, num_compiled=self._runner.num_compiled)
