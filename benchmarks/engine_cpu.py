"""Measure the engine on a CPU with a tiny model: warm against cold, `all` against `none`, memory over requests.

    JAX_PLATFORMS=cpu python -m benchmarks.engine_cpu
    JAX_PLATFORMS=cpu python -m benchmarks.engine_cpu --cases memory --requests 20000

Ratios within one run are what counts: absolute times of a shared CPU mean little. So what is compared takes turns, and
the median of the turns' ratios is reported. Each case checks its answers before it times anything and after every turn,
and the run ends without numbers if they are wrong or if memory grows.
"""

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams

_MODEL = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tiny-hybrid"
_SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 4096,
    "use_tqdm": False,
}
Case = Literal["warm-over-cold", "all-over-none", "memory"]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run.

    Attributes:
        output: JSON file for the results.
        cases: which cases; all by default.
        repeats: turns per case; the median of their ratios counts.
        prompt: tokens of the prompt that is sent cold and warm, at most 4,000.
        requests: how many the memory case runs, at least 800.
        most_growth_mib: the memory case fails if the process grows by more after its warm period.
        most_objects: the memory case fails if Python has more additional objects after its warm period.
    """

    output: Path = Path("benchmarks/results/engine-cpu.json")
    cases: tuple[Case, ...] = ("warm-over-cold", "all-over-none", "memory")
    repeats: int = 9
    prompt: int = 4000
    requests: int = 4000
    most_growth_mib: float = 8.0
    most_objects: int = 500


def _row(case: str, metric: str, value: float, unit: str) -> ResultRow:
    return ResultRow(case=f"engine/{case}", metric=metric, value=value, unit=unit, implementation="ours", error=0.0)


def _prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)  # so that no two prompts share a block
    return [draw.randrange(1, 250) for _ in range(length)]


def _refuse(problem: str) -> None:
    raise SystemExit(f"no number is reported: {problem}")


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _timed(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> tuple[float, list[list[int]], list[int]]:
    """Return the seconds of one call, the answers, and how many tokens of each prompt came from the cache."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, _greedy(max_tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    answers = [output.outputs[0].token_ids for output in outputs]
    if any(len(answer) != max_tokens for answer in answers):
        _refuse(f"answers have {[len(answer) for answer in answers]} tokens, not {max_tokens}")
    return seconds, answers, [output.num_cached_tokens for output in outputs]


def warm_over_cold(arguments: Arguments) -> list[ResultRow]:
    """Time to the first token of a prompt seen before, as a share of the same prompt's cold."""
    llm, length = LLM(str(_MODEL), **_SETTINGS), arguments.prompt
    uncached = LLM(str(_MODEL), prefix_cache="none", **_SETTINGS)
    cold: list[float] = []
    warm: list[float] = []
    for turn in range(arguments.repeats + 1):  # the first turn compiles
        prompt = [_prompt(turn, length)]
        seconds, answer, before = _timed(llm, prompt, 1)
        again, same, hit = _timed(llm, prompt, 1)
        if (before, hit) != ([0], [(length - 1) // 64 * 64]):
            _refuse(f"{before} and then {hit} tokens of {length} came from the cache")
        if not answer == same == _timed(uncached, prompt, 1)[1]:
            _refuse("a warm answer is not the cold one")
        if turn:
            cold.append(seconds)
            warm.append(again)
    ratios = [again / seconds for again, seconds in zip(warm, cold, strict=True)]
    return [
        _row(f"ttft/{length}/warm-over-cold", "median", statistics.median(ratios), "ratio"),
        _row(f"ttft/{length}/cold", "median", statistics.median(cold), "s"),
        _row(f"ttft/{length}/warm", "median", statistics.median(warm), "s"),
    ]


def all_over_none(arguments: Arguments) -> list[ResultRow]:
    """Time of a cold batch in mode `all` as a share of mode `none`, the two taking turns at going first."""
    engines = {mode: LLM(str(_MODEL), prefix_cache=mode, **_SETTINGS) for mode in ("none", "all")}
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for turn in range(arguments.repeats + 1):  # the first turn compiles
        prompts = [_prompt(100 * (turn + 1) + i, 600 + 90 * i) for i in range(8)]
        answers: dict[str, list[list[int]]] = {}
        for mode in list(engines)[:: 1 if turn % 2 else -1]:
            took, answers[mode], cached = _timed(engines[mode], prompts, 64)
            if any(cached):
                _refuse(f"mode {mode} was not cold: {cached} tokens came from the cache")
            if turn:
                seconds[mode].append(took)
        if answers["none"] != answers["all"]:
            _refuse("mode all and mode none answer differently")
    if engines["all"].stats().saves == 0:
        _refuse("mode all saved nothing, so that it had no work of its own")
    ratios = [full / none for full, none in zip(seconds["all"], seconds["none"], strict=True)]
    return [
        _row("cold/all-over-none", "median", statistics.median(ratios), "ratio"),
        _row("cold/all-over-none", "least", min(ratios), "ratio"),
        _row("cold/all-over-none", "most", max(ratios), "ratio"),
        _row("cold/none", "median", statistics.median(seconds["none"]), "s"),
    ]


def _resident_mib() -> float:
    """Return how much of the process is in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(arguments: Arguments) -> list[ResultRow]:
    """Growth of the process and of the number of Python's objects after a warm period of half of the requests.

    Pools are small, so that the cache has long been full by then. Batches are alike, so that what one leaves behind is
    seen as often as there are batches.
    """
    if arguments.requests < 800:
        raise SystemExit(f"requests must be at least 800, half of them a warm period; got {arguments.requests}")
    llm = LLM(str(_MODEL), num_blocks=128, num_state_slots=32, **_SETTINGS)
    probe = [_prompt(-1 - i, 70 + 20 * i) for i in range(4)]
    _, before, _ = _timed(llm, probe, 8)
    resident: list[float] = []
    objects: list[int] = []
    for batch in range(arguments.requests // 100):
        _timed(llm, [_prompt(batch * 100 + i, 70 + i % 60) for i in range(100)], 4)
        gc.collect()
        resident.append(_resident_mib())
        objects.append(len(gc.get_objects()))
    if _timed(llm, probe, 8)[1] != before:
        _refuse("answers are not those of the fresh engine")
    held = llm.stats()
    if held.blocks_used or held.slots_used:
        _refuse(f"after the last request something is still held: {held}")
    if held.evictions == 0:
        _refuse("the cache never filled up, so that its own growth was measured")
    half, tail = len(resident) // 2, max(len(resident) // 10, 1)
    growth = statistics.median(resident[-tail:]) - statistics.median(resident[half : half + tail])
    more = round(statistics.median(objects[-tail:]) - statistics.median(objects[half : half + tail]))
    if growth > arguments.most_growth_mib or more > arguments.most_objects:
        _refuse(
            f"over the last {(len(resident) - half) * 100} requests the process grew by {growth:.1f} MiB and {more} "
            f"objects; at most {arguments.most_growth_mib} MiB and {arguments.most_objects} objects are noise"
        )
    return [
        _row(f"memory/{arguments.requests}-requests", "growth", growth, "MiB"),
        _row(f"memory/{arguments.requests}-requests", "more-objects", more, "objects"),
    ]


_CASES: dict[Case, Callable[[Arguments], list[ResultRow]]] = {
    "warm-over-cold": warm_over_cold,
    "all-over-none": all_over_none,
    "memory": memory,
}


def main(arguments: Arguments) -> None:
    """Run the cases and write the file."""
    rows = [row for case in arguments.cases for row in _CASES[case](arguments)]
    write_results(arguments.output, "engine-cpu", rows)
    for row in rows:
        sys.stdout.write(f"{row.case:40} {row.metric:12} {row.value:.4g} {row.unit}\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
