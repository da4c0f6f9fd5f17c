"""Measure the engine on a CPU with a tiny model: warm against cold, `all` against `none`, memory over requests.

    JAX_PLATFORMS=cpu python -m benchmarks.engine_cpu

Ratios within one run are what counts: absolute times of a shared CPU mean little. Each case checks its answers first
and reports no number if they are wrong.
"""

import random
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams

_MODEL = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tiny-hybrid"
_SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 4608 - 512,
    "use_tqdm": False,
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run.

    Attributes:
        output: JSON file for the results.
        repeats: measurements per case; the median counts.
        requests: how many the memory case runs.
    """

    output: Path = Path("benchmarks/results/engine-cpu.json")
    repeats: int = 5
    requests: int = 2000


def _row(case: str, metric: str, value: float, unit: str) -> ResultRow:
    return ResultRow(case=case, metric=metric, value=value, unit=unit, implementation="ours", error=0.0)


def _prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)  # so that no two prompts share a block
    return [draw.randrange(1, 250) for _ in range(length)]


def _first_token_seconds(llm: LLM, prompt: list[int]) -> tuple[float, int, list[int]]:
    began = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began, output.num_cached_tokens, output.outputs[0].token_ids


def warm_against_cold(repeats: int) -> list[ResultRow]:
    """Time to first token of a 4,000-token prompt seen before, as a share of the same prompt cold."""
    llm = LLM(str(_MODEL), **_SETTINGS)
    _first_token_seconds(llm, _prompt(0, 4000))
    _first_token_seconds(llm, _prompt(0, 4000))
    cold, warm = [], []
    for seed in range(1, repeats + 1):
        prompt = _prompt(seed, 4000)
        seconds, cached, first = _first_token_seconds(llm, prompt)
        again, hit, second = _first_token_seconds(llm, prompt)
        if cached != 0 or hit != 3968 or first != second:
            raise SystemExit(f"warm is not cold: {cached} and {hit} tokens cached, tokens {first} and {second}")
        cold.append(seconds)
        warm.append(again)
    ratio = statistics.median(warm) / statistics.median(cold)
    return [_row("engine/ttft/4000/warm-over-cold", "ratio", ratio, "1")]


def all_against_none(repeats: int) -> list[ResultRow]:
    """Cold throughput of mode `all` as a share of mode `none`, the two taking turns."""
    engines = {mode: LLM(str(_MODEL), prefix_cache=mode, **_SETTINGS) for mode in ("none", "all")}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(repeats + 1):  # the first turn compiles
        prompts = [_prompt(100 * turn + i, 600 + 90 * i) for i in range(8)]
        for mode, llm in engines.items():
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if turn:
                seconds[mode].append(time.perf_counter() - began)
            answers[mode] = [output.outputs[0].token_ids for output in outputs]
        if answers["none"] != answers["all"]:
            raise SystemExit("mode all and mode none answer differently")
    medians = {mode: statistics.median(times) for mode, times in seconds.items()}
    return [
        _row("engine/cold/all-over-none", "ratio", medians["all"] / medians["none"], "1"),
        _row("engine/cold/none", "s", medians["none"], "s"),
    ]


def memory_over_requests(count: int) -> list[ResultRow]:
    """Growth of the process between the first quarter of the requests and the last."""
    llm = LLM(str(_MODEL), **_SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    peaks: list[int] = []
    for batch in range(count // 100):
        llm.generate([_prompt(batch * 100 + i, 70 + i % 60) for i in range(100)], params, use_tqdm=False)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    held = llm.stats()
    if held.blocks_used or held.slots_used:
        raise SystemExit(f"after the last request something is still held: {held}")
    growth = (peaks[-1] - peaks[len(peaks) // 4]) / 1024
    return [_row(f"engine/memory/{count}-requests", "growth", growth, "MiB")]


def main(arguments: Arguments) -> None:
    """Run every case and write the file."""
    rows = [
        *warm_against_cold(arguments.repeats),
        *all_against_none(arguments.repeats),
        *memory_over_requests(arguments.requests),
    ]
    write_results(arguments.output, "engine-cpu", rows)
    for row in rows:
        sys.stdout.write(f"{row.case:40} {row.metric:8} {row.value:.4g} {row.unit}\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
