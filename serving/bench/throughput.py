"""`gdn-jax bench throughput`: how many requests and tokens a second an engine gets through, all asked at once.

Flags, printed lines and JSON keys are those of `vllm bench throughput`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from gdn_jax.serving.bench.report import EngineWork, Report, check_writable, measured_with
from gdn_jax.serving.bench.run import sampling_params, start, timed_generate
from gdn_jax.serving.bench.workload import (
    MOST_REQUESTS,
    BenchRequest,
    RandomWorkload,
    ShareGPTWorkload,
    check_at_least,
    check_at_most,
    check_fit,
)
from gdn_jax.serving.config import EngineConfig, SettingError
from gdn_jax.serving.llm import LLM
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
_OUTPUT_LEN = 128  # vLLM's, of random requests


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Run many requests, all asked at once, with the flags of `vllm bench throughput`.

    The prefix cache is on, as it is there: prompts share --random-prefix-len tokens, and nothing else but by chance.

    Attributes:
        engine: settings of the engine; the seed draws the requests too.
        dataset_name: random, for prompts of random tokens, or sharegpt, for those of a file; left out: sharegpt if
            dataset_path names a file, else random.
        dataset_path: file of ShareGPT's form: JSON, a list of objects with `conversations`, each a list of objects with
            `value`.
        input_len: random: tokens of a prompt after the common prefix.
        output_len: tokens of an answer, which end tokens do not end; left out: 128 for random ones, and those of the
            file's own answers.
        random_range_ratio: random: lengths lie in [length * (1 - ratio), length * (1 + ratio)], uniformly.
        random_prefix_len: random: tokens that all prompts begin with.
        num_prompts: requests.
        num_warmups: run this many of the requests once before, untimed, and empty the prefix cache; left out: none if
            all steps were compiled at the start, as on an accelerator, else all, so that no step is compiled in the
            time measured.
        n: answers per prompt.
        output_json: file for the results.
        disable_detokenize: make no text of the answers.
        quiet: only warnings and results, no progress bars.
        verbose: also one log line per step.
    """

    engine: OmitArgPrefixes[EngineConfig]
    dataset_name: str | None = None
    dataset_path: str | None = None
    input_len: Annotated[int | None, arg(aliases=["--random-input-len"])] = None
    output_len: Annotated[int | None, arg(aliases=["--random-output-len"])] = None
    random_range_ratio: float = 0.0
    random_prefix_len: Annotated[int, arg(aliases=["--prefix-len"])] = 0
    num_prompts: int = 1000
    num_warmups: int | None = None
    n: int = 1
    output_json: str | None = None
    disable_detokenize: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        """Check the counts; lengths and `n` are checked where they are used, before a model is loaded.

        Raises:
            SettingError: one is out of its range.
        """
        check_at_least(1, num_prompts=self.num_prompts)
        check_at_most(MOST_REQUESTS, num_prompts=self.num_prompts)
        if self.num_warmups is not None:
            check_at_least(0, num_warmups=self.num_warmups)

    def workload(self) -> RandomWorkload | ShareGPTWorkload:
        """Return what is asked.

        Raises:
            SettingError: settings are out of their range, or do not go together.
        """
        name = self.dataset_name or ("random" if self.dataset_path is None else "sharegpt")
        if name == "random":
            return self._random()
        if name != "sharegpt":
            raise SettingError(f"dataset_name must be random or sharegpt; got {name!r}; other datasets are not read")
        if self.dataset_path is None:
            raise SettingError("dataset_name sharegpt must have a file; got none; set dataset_path")
        if self.input_len is not None or self.random_prefix_len or self.random_range_ratio:
            raise SettingError(
                "input_len, random_prefix_len and random_range_ratio must be left out with dataset_name sharegpt, "
                f"whose prompts are those of the file; got {self.input_len}, {self.random_prefix_len} and "
                f"{self.random_range_ratio}"
            )
        return ShareGPTWorkload(seed=self.engine.seed, path=self.dataset_path, output_len=self.output_len)

    def _random(self) -> RandomWorkload:
        if self.dataset_path is not None:
            raise SettingError(
                f"dataset_path must be left out with dataset_name random; got {self.dataset_path}; for a file set "
                "dataset_name to sharegpt"
            )
        if self.input_len is None:
            raise SettingError("input_len must be given for random prompts; got none; set it, or dataset_path")
        return RandomWorkload(
            seed=self.engine.seed,
            input_len=self.input_len,
            output_len=_OUTPUT_LEN if self.output_len is None else self.output_len,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
        )

    def params(self, num_tokens: int) -> SamplingParams:
        """Return how a request samples.

        Raises:
            RequestError: `n` is out of its range.
        """
        return sampling_params(num_tokens, n=self.n, detokenize=not self.disable_detokenize)


def measure_throughput(asked: Throughput) -> Report:
    """Run the benchmark.

    Raises:
        SettingError: settings are out of their range or do not go together, the file cannot be used, or a request is
            longer than the engine takes.
        EngineError: what starting and running an engine raises.
    """
    workload = asked.workload()
    asked.params(1)  # refused now, not when the model is loaded
    if isinstance(workload, ShareGPTWorkload):
        workload.check()
    elif asked.engine.max_model_len:
        check_fit(workload.lengths(asked.num_prompts), asked.engine.max_model_len)
    if asked.output_json is not None:
        check_writable(asked.output_json)
    llm = start(asked.engine, quiet=asked.quiet)
    if isinstance(workload, ShareGPTWorkload):
        requests = workload.requests(asked.num_prompts, llm.get_tokenizer(), llm.max_model_len)
    else:
        requests = workload.requests(asked.num_prompts, llm.get_tokenizer())
    longer = llm.memory.how_to_take_longer(llm.model_config.context_length)
    check_fit([request.lengths for request in requests], llm.max_model_len, longer)

    def run(some: Sequence[BenchRequest]) -> tuple[float, list[RequestOutput]]:
        params = [asked.params(request.num_answer_tokens) for request in some]
        return timed_generate(llm, some, params, show_progress=not asked.quiet)

    if num_warmups := _num_warmups(asked, llm):
        run(requests[:num_warmups])
        llm.reset_prefix_cache()
    before = llm.stats()
    seconds, outputs = run(requests)
    return _report(seconds, outputs, llm, EngineWork.between(before, llm.stats()))


def _num_warmups(asked: Throughput, llm: LLM) -> int:
    if asked.num_warmups is not None:
        return asked.num_warmups
    if llm.stats().compilations:
        return 0
    _LOG.info(
        "warm-up: all requests run once before, untimed, as no step is compiled yet (--num-warmups sets how many)"
    )
    return asked.num_prompts


def _report(seconds: float, outputs: Sequence[RequestOutput], llm: LLM, work: EngineWork) -> Report:
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    rates = {
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }
    requests, tokens, output_tokens = rates.values()
    return Report(
        lines=(
            f"Throughput: {requests:.2f} requests/s, {tokens:.2f} total tokens/s, {output_tokens:.2f} output tokens/s",
            f"Total num prompt tokens:  {num_input}",
            f"Total num output tokens:  {num_output}",
            *work.lines(),
        ),
        values={
            "elapsed_time": seconds,
            "num_requests": len(outputs),
            "total_num_tokens": num_input + num_output,
            **rates,
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            **measured_with(llm, work),
        },
    )
