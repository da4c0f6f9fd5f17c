"""Time to the first token of one request, through the whole engine: new prompts, and one whose start is cached.

    python -m benchmarks.first_token
    python -m benchmarks.first_token --model configs/models/qwen3.5-9b

The model has random weights. Every prompt is drawn anew, so that nothing of it is cached; that of a hit begins with
tokens of a prompt that ran before. The time is that of `LLM.generate` for one token: from token ids on the host to the
answer on the host.
"""

import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams
from gdn_jax.config import ModelConfig

_LOG = logging.getLogger(__name__)
_WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        model: folder with a config.json.
        output: where the results go; by default into a file of benchmarks/results/ that bears the model's name.
        prompts: lengths of prompts that are new.
        cached: tokens of a hit that are cached.
        added: tokens of a hit that are new.
        kernels: implementation of the kernels.
        dtype: of weights and activations.
        repeats: timed requests of each kind, after two that are not.
    """

    model: Path = Path("configs/models/qwen3.5-4b")
    output: Path | None = None
    prompts: tuple[int, ...] = (1024, 8192)
    cached: int = 8192
    added: int = 32
    kernels: Literal["mosaic", "jax"] = "mosaic"
    dtype: str = "auto"
    repeats: int = 7

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((*self.prompts, self.cached + self.added))


def prompts_of(options: Options, vocab_size: int) -> Iterator[tuple[str, int, list[list[int]]]]:
    """Yield each case, how much of a prompt is cached, and prompts; a hit's first one leaves what the others find."""
    rng, count = np.random.default_rng(0), _WARM_UPS + options.repeats

    def draw(num_tokens: int) -> list[int]:
        return rng.integers(vocab_size, size=num_tokens).tolist()

    for length in options.prompts:
        yield f"prefill/{length}", 0, [draw(length) for _ in range(count)]
    start = draw(options.cached)
    hits = [start + draw(options.added) for _ in range(count)]
    yield f"prefill/{options.added}on{options.cached}", options.cached, hits


def time_case(llm: LLM, prompts: list[list[int]], cached: int) -> list[float]:
    """Return the seconds of one token after each prompt but the first two.

    Raises:
        SystemExit: another number of its tokens than `cached` was found, so that the time is of something else.
    """
    seconds = []
    for prompt in prompts:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        if len(seconds) > _WARM_UPS and output.num_cached_tokens != cached:
            raise SystemExit(f"{cached} tokens of a prompt must be cached; got {output.num_cached_tokens}: no times")
    return seconds[_WARM_UPS:]


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    llm = LLM(
        str(options.model),
        load_format="dummy",
        dtype=options.dtype,
        kernels=options.kernels,
        prefix_cache="all",
        max_model_len=options.longest + 64,
        max_num_seqs=1,
        max_num_batched_tokens=options.longest,
    )
    vocab_size = ModelConfig.from_folder(options.model).vocab_size
    rows: list[ResultRow] = []
    output = options.output or Path("benchmarks/results") / f"first-token-{options.model.name}.json"
    for name, cached, prompts in prompts_of(options, vocab_size):
        case = f"model/{options.model.name}/{name}"
        seconds = time_case(llm, prompts, cached)
        row = partial(ResultRow, case=case, implementation=options.kernels, unit="ms", error=None)
        rows += [
            row(metric="ms to the first token", value=1e3 * statistics.median(seconds)),
            row(metric="ms to the first token, longest", value=1e3 * max(seconds)),
        ]
        _LOG.info("%s  %s  ms to the first token: %.4g", case, options.kernels, rows[-2].value)
        write_results(output, "first-token", rows)


if __name__ == "__main__":
    main()
