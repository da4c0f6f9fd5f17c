"""`gdn-jax bench latency`: how long one batch takes from its first prompt token to its last answered one.

Flags, printed lines and JSON keys are those of `vllm bench latency`.
"""
# pyright: reportUnknownMemberType=false

import logging
from dataclasses import dataclass

import jax
import numpy as np
from tqdm import tqdm
from tyro.conf import OmitArgPrefixes

from gdn_jax.serving.bench.report import EngineWork, Report, check_folder, check_writable, measured_with
from gdn_jax.serving.bench.run import sampling_params, start, timed_generate
from gdn_jax.serving.bench.workload import MOST_REQUESTS, RandomWorkload, check_at_least, check_at_most, check_fit
from gdn_jax.serving.config import EngineConfig, PrefixCache
from gdn_jax.serving.llm import LLM

_LOG = logging.getLogger(__name__)
_PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class UncachedEngine(EngineConfig):
    """Settings of an engine that is timed on one batch again and again, so that the cache is off unless asked for."""

    prefix_cache: PrefixCache = "none"


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Time one batch of random prompts again and again, with the flags of `vllm bench latency`.

    The prompts are drawn once, and every iteration runs the same. So that none is cheaper than the first, the prefix
    cache is off, as it is there: --prefix-cache all switches it on, and then all but the first find their prompts.

    Attributes:
        engine: settings of the engine; the seed draws the prompts too.
        input_len: tokens of a prompt.
        output_len: tokens of an answer; end tokens do not end it.
        batch_size: prompts at once.
        n: answers per prompt.
        num_iters_warmup: iterations before those that are timed.
        num_iters: iterations that are timed.
        profile: after the warm-up run one iteration under JAX's profiler, and time none.
        profile_result_dir: folder for the profile; TensorBoard and ui.perfetto.dev show it.
        output_json: file for the results.
        disable_detokenize: make no text of the answers.
        quiet: only warnings and results, no progress bars.
        verbose: also one log line per step.
    """

    engine: OmitArgPrefixes[UncachedEngine]
    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    num_iters_warmup: int = 10
    num_iters: int = 30
    profile: bool = False
    profile_result_dir: str = "runs/profile"
    output_json: str | None = None
    disable_detokenize: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        """Check the counts; lengths and `n` are checked where they are used, before a model is loaded.

        Raises:
            SettingError: one is out of its range.
        """
        check_at_least(1, input_len=self.input_len, batch_size=self.batch_size, num_iters=self.num_iters)
        check_at_most(MOST_REQUESTS, batch_size=self.batch_size)
        check_at_least(0, num_iters_warmup=self.num_iters_warmup)


def measure_latency(asked: Latency) -> Report:
    """Run the benchmark.

    Raises:
        SettingError: a setting is out of its range, or prompt and answer are longer than the engine takes.
        EngineError: what starting and running an engine raises.
    """
    workload = RandomWorkload(seed=asked.engine.seed, input_len=asked.input_len, output_len=asked.output_len)
    params = sampling_params(asked.output_len, n=asked.n, detokenize=not asked.disable_detokenize)
    lengths = workload.lengths(1)
    if asked.engine.max_model_len:
        check_fit(lengths, asked.engine.max_model_len)
    if asked.output_json is not None:
        check_writable(asked.output_json)
    if asked.profile:
        check_folder(asked.profile_result_dir)
        if asked.output_json is not None:
            _LOG.warning("nothing is written to %s, since a profile times nothing", asked.output_json)
    llm = start(asked.engine, quiet=asked.quiet)
    check_fit(lengths, llm.max_model_len, llm.memory.how_to_take_longer(llm.model_config.context_length))
    if (num_rows := asked.batch_size * asked.n) > llm.memory.max_num_seqs:
        _LOG.warning("only %d of the %d sequences run at once (max_num_seqs)", llm.memory.max_num_seqs, num_rows)
    requests = workload.requests(asked.batch_size, llm.get_tokenizer())

    def run_once() -> float:
        return timed_generate(llm, requests, [params] * len(requests))[0]

    def iterations(what: str, count: int) -> list[float]:
        hidden = True if asked.quiet else None  # None: shown on a terminal alone
        return [run_once() for _ in tqdm(range(count), desc=what, disable=hidden, leave=False)]

    iterations("warm-up", asked.num_iters_warmup)
    if asked.profile:
        with jax.profiler.trace(asked.profile_result_dir):
            run_once()
        return Report(lines=(f"Profile of one iteration: {asked.profile_result_dir}",), values={})
    before = llm.stats()
    latencies = iterations("iterations", asked.num_iters)
    return _report(latencies, llm, EngineWork.between(before, llm.stats()))


def _report(latencies: list[float], llm: LLM, work: EngineWork) -> Report:
    average, spread = float(np.mean(latencies)), float(np.std(latencies))
    percentiles = dict(zip(_PERCENTAGES, np.percentile(latencies, _PERCENTAGES).tolist(), strict=True))
    return Report(
        lines=(
            f"Avg latency: {average} seconds",
            f"Std latency: {spread} seconds",
            *(f"{percentage}% percentile latency: {value} seconds" for percentage, value in percentiles.items()),
            *work.lines(),
        ),
        values={
            "avg_latency": average,
            "std_latency": spread,
            "latencies": latencies,
            "percentiles": percentiles,
            **measured_with(llm, work),
        },
    )
