"""Measure speculation on a CPU with a tiny model: that it changes no token and no hit, and what a step costs.

    JAX_PLATFORMS=cpu python -m benchmarks.speculation_cpu
    JAX_PLATFORMS=cpu python -m benchmarks.speculation_cpu --model path/to/model --dtype float32

The tokens of every number of drafts are compared with those of plain decoding, cold and from the cache, before anything
is timed, and the run ends without numbers if one differs. Then three engines take turns, and the median of the turns'
ratios is reported: plain decoding; windows of 1 + k tokens without the head, which shows what verifying costs; and
windows with the head. In float32 tokens must be equal; in shorter dtypes near-ties may fall otherwise.
"""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax import LLM, SamplingParams
from gdn_jax.serving.runner.steps import split_model

_MODEL = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tiny-hybrid"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run.

    Attributes:
        output: JSON file for the results.
        model: folder of a model with an MTP head; its tokens are compared, and its steps timed.
        dtype: of weights and activations.
        drafts: drafts per step of the timed engines.
        compared: most drafts per step whose tokens are compared with those of plain decoding, from 1.
        repeats: turns; the median of their ratios counts.
        rows: requests that decode together.
        tokens: that each of them generates.
    """

    output: Path = Path("benchmarks/results/speculation-cpu.json")
    model: Path = _MODEL
    dtype: str = "float32"
    drafts: int = 3
    compared: int = 4
    repeats: int = 9
    rows: int = 8
    tokens: int = 160


def _refuse(problem: str) -> None:
    raise SystemExit(f"no number is reported: {problem}")


def _engine(arguments: Arguments, num_drafts: int) -> LLM:
    return LLM(
        arguments.model,
        speculative_tokens=num_drafts,
        dtype=arguments.dtype,
        max_num_seqs=arguments.rows,
        max_num_batched_tokens=512,
        max_model_len=1024,
        state_interval=64,
        use_tqdm=False,
    )


def _prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(seed)  # so that no two prompts share a block
    return [[draw.randrange(1, 250) for _ in range(length)] for length in lengths]


def compare(arguments: Arguments) -> list[ResultRow]:
    """Compare tokens and hits of every number of drafts with plain decoding: cold, again, and a turn further."""
    found: list[tuple[list[list[int]], list[int]]] = []
    rows: list[ResultRow] = []
    params = [
        SamplingParams(temperature=temperature, top_p=0.95, seed=index, max_tokens=90, ignore_eos=True)
        for index, temperature in enumerate((0.0, 0.0, 0.7, 1.0))
    ]
    for num_drafts in range(arguments.compared + 1):
        llm = _engine(arguments, num_drafts)
        prompts = _prompts(1, (5, 63, 130, 200))
        tokens: list[list[int]] = []
        cached: list[int] = []
        for _ in range(3):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens += [output.outputs[0].token_ids for output in outputs]
            cached += [output.num_cached_tokens for output in outputs]
            again = len(tokens) == len(prompts)
            if not again:
                more = _prompts(2, [9] * len(prompts))
                prompts = [
                    [*prompt, *output.outputs[0].token_ids, *turn]
                    for prompt, output, turn in zip(prompts, outputs, more, strict=True)
                ]
        found.append((tokens, cached))
        if found[-1] != found[0]:
            _refuse(f"with {num_drafts} drafts tokens or hits are not those of plain decoding")
        if not any(cached):
            _refuse("nothing came from the cache, so that hits were not compared")
        rows.append(_row(f"hits/k{num_drafts}", "hit_tokens", sum(cached), "tokens"))
    return rows


def time_steps(arguments: Arguments) -> list[ResultRow]:
    """Time decode steps of the three engines in turns."""
    engines = {
        name: _engine(arguments, 0 if name == "plain" else arguments.drafts) for name in ("plain", "window", "mtp")
    }
    _leave_out_head(engines["window"])
    per_step: dict[str, list[float]] = {name: [] for name in engines}
    per_token: dict[str, list[float]] = {name: [] for name in engines}
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    for turn in range(arguments.repeats + 1):  # the first turn compiles
        prompts = _prompts(10 + turn, [16] * arguments.rows)
        answers: list[list[list[int]]] = []
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            llm = engines[name]
            before = llm.stats().steps
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            answers.append([output.outputs[0].token_ids for output in outputs])
            if turn:
                per_step[name].append(seconds / (llm.stats().steps - before))
                per_token[name].append(seconds / arguments.rows / arguments.tokens)
        if arguments.dtype == "float32" and any(answer != answers[0] for answer in answers):
            _refuse("the timed engines answer differently")
    case = f"k{arguments.drafts}/rows{arguments.rows}"
    stats = engines["mtp"].stats()

    def ratio(times: dict[str, list[float]], name: str, other: str = "plain") -> float:
        return statistics.median(one / two for one, two in zip(times[name], times[other], strict=True))

    return [
        _row(f"{case}/plain", "step", statistics.median(per_step["plain"]) * 1e3, "ms"),
        _row(f"{case}/window", "step", statistics.median(per_step["window"]) * 1e3, "ms"),
        _row(f"{case}/mtp", "step", statistics.median(per_step["mtp"]) * 1e3, "ms"),
        _row(f"{case}/window-over-plain", "step", ratio(per_step, "window"), "ratio"),
        _row(f"{case}/mtp-over-plain", "step", ratio(per_step, "mtp"), "ratio"),
        _row(f"{case}/plain-over-mtp", "seconds_per_token", 1 / ratio(per_token, "mtp"), "ratio"),
        _row(f"{case}/mtp", "tokens_per_verify", stats.tokens_per_verify, "tokens"),
    ]


def _leave_out_head(llm: LLM) -> None:
    """Let an engine verify windows and draft nothing: its drafts stay zeros, which hardly ever stand."""
    runner = llm._engine._runner
    model = runner._static.model(runner._params)
    model.mtp = None
    runner._static, runner._params = split_model(
        model, num_valid_tokens=runner._static.num_valid_tokens, num_top=runner._static.num_top
    )
    runner._device = replace(runner.device, model=replace(runner.state, mtp=None))


def _row(case: str, metric: str, value: float, unit: str) -> ResultRow:
    return ResultRow(
        case=f"speculation/{case}", metric=metric, value=value, unit=unit, implementation="ours", error=0.0
    )


def main(arguments: Arguments) -> None:
    """Run both parts and write the file."""
    rows = compare(arguments) + time_steps(arguments)
    write_results(arguments.output, "speculation-cpu", rows)
    for row in rows:
        sys.stdout.write(f"{row.case:44} {row.metric:18} {row.value:.4g} {row.unit}\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
