"""What the benchmarks share: how requests sample, how an engine starts, and one timed call of it."""

import time
from collections.abc import Sequence

from gdn_jax.serving.bench.workload import BenchRequest
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import EngineError
from gdn_jax.serving.llm import LLM
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.sampling_params import SamplingParams


def sampling_params(num_tokens: int, *, n: int, detokenize: bool) -> SamplingParams:
    """Return how a request of a benchmark samples: as the model would have it, and to its length.

    Raises:
        RequestError: a number is out of its range.
    """
    return SamplingParams(
        n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=num_tokens, detokenize=detokenize
    )


def start(config: EngineConfig, *, quiet: bool) -> LLM:
    """Start an engine."""
    return LLM(config.model, **config.arguments(), use_tqdm=not quiet)


def timed_generate(
    llm: LLM, requests: Sequence[BenchRequest], params: Sequence[SamplingParams], *, show_progress: bool = False
) -> tuple[float, list[RequestOutput]]:
    """Run all requests at once; return the seconds they took together, and their outputs.

    Raises:
        EngineError: an answer is not as long as asked: a step failed under it, and the time says nothing.
    """
    prompts = [request.token_ids for request in requests]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=show_progress)
    seconds = time.perf_counter() - began
    for request, output in zip(requests, outputs, strict=True):
        for completion in output.outputs:
            if len(completion.token_ids) != request.num_answer_tokens:
                raise EngineError(
                    f"no number is reported: request {output.request_id} was to get {request.num_answer_tokens} tokens "
                    f"and got {len(completion.token_ids)} ({completion.finish_reason}); the log says why"
                )
    return seconds, outputs
