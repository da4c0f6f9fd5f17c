"""`gdn-jax bench latency`: the batch that was asked for, again and again, and vLLM's lines and keys."""

import json
import re
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracles.bench_rig import Bench
from oracles.cli_rig import own_environment, run_command
from oracles.engine_rig import TINY

PERCENTAGES = ["10", "25", "50", "75", "90", "99"]
SHORT = ("latency", "--num-iters-warmup", "2", "--num-iters", "3")
BATCH = ("--input-len", "9", "--output-len", "5", "--batch-size", "2")
SMALL = ("--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    with own_environment():
        yield


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch=monkeypatch, output=tmp_path / "results.json")


def check_times(found: dict, num_iters: int) -> None:
    assert len(found["latencies"]) == num_iters
    assert all(seconds > 0 for seconds in found["latencies"])
    assert found["avg_latency"] == pytest.approx(statistics.mean(found["latencies"]))
    assert found["std_latency"] == pytest.approx(statistics.pstdev(found["latencies"]))
    assert list(found["percentiles"]) == PERCENTAGES
    values = list(found["percentiles"].values())
    assert values == sorted(values)
    assert found["percentiles"]["50"] == pytest.approx(statistics.median(found["latencies"]))
    assert min(found["latencies"]) <= values[0] <= values[-1] <= max(found["latencies"])


def test_every_iteration_runs_the_batch_that_was_asked_for(bench: Bench) -> None:
    check_times(bench.results(*SHORT, *BATCH), 3)
    assert len(bench.requests) == 2 * (2 + 3)
    for request in bench.requests:
        assert len(request.prompt) == 9
        assert request.max_tokens == 5
        assert request.params.ignore_eos
        assert (request.params.temperature, request.params.top_p) == (1.0, 1.0)
    batches = {tuple(tuple(request.prompt) for request in bench.requests[i : i + 2]) for i in range(0, 10, 2)}
    assert len(batches) == 1
    assert bench.requests[0].prompt != bench.requests[1].prompt


def test_the_lines_are_vllms_and_stand_alone_on_standard_output(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench.results(*SHORT, *BATCH)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"Avg latency: {found['avg_latency']} seconds", f"Std latency: {found['std_latency']} seconds"]
    assert lines[2:] == [f"{at}% percentile latency: {value} seconds" for at, value in found["percentiles"].items()]


def test_what_was_measured_stands_beside_the_times(bench: Bench) -> None:
    found = bench.results(*SHORT, *BATCH)
    assert {"device", "date", "versions", "kernels", "settings", "command"} <= set(found)
    assert found["command"].startswith("gdn-jax bench latency --num-iters-warmup 2 --num-iters 3 --input-len 9")


def test_the_prefix_cache_is_off_unless_asked_for(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """With it, two blocks of 4 of a prompt's 9 tokens are found again, and no iteration is like the first."""
    assert bench.results(*SHORT, *BATCH)["prefix_cache_hit_rate"] == 0
    assert bench.results(*SHORT, *BATCH, "--prefix-cache", "align")["prefix_cache_hit_rate"] == pytest.approx(8 / 9)
    assert capsys.readouterr().out.splitlines()[-1] == "Prefix cache hit rate: 88.9%"
    assert [config.prefix_cache for config in bench.configs] == ["none", "align"]


@pytest.mark.parametrize(("flags", "makes_text"), [((), True), (("--disable-detokenize",), False)])
def test_text_is_made_unless_switched_off(bench: Bench, flags: tuple[str, ...], makes_text: bool) -> None:
    bench.results(*SHORT, *BATCH, *flags)
    assert {request.params.detokenize for request in bench.requests} == {makes_text}


def test_several_answers_per_prompt_run_as_siblings(bench: Bench) -> None:
    bench.results("latency", "--num-iters-warmup", "0", "--num-iters", "1", *BATCH, "--n", "2")
    assert len(bench.requests) == 4
    assert sum(request.leader is not None for request in bench.requests) == 2


def test_what_drafts_brought_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.results(*SHORT, "--input-len", "9", "--output-len", "40", "--batch-size", "1", num_drafts=3)
    assert found["tokens_per_verify"] > 1
    assert f"Tokens per verify: {found['tokens_per_verify']:.2f}" in capsys.readouterr().out.splitlines()


def test_a_batch_that_does_not_run_at_once_is_warned_of(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.results(*SHORT, "--input-len", "3", "--output-len", "2", "--batch-size", "3", "--n", "2", lanes=4)
    assert "only 4 of the 6 sequences run at once (max_num_seqs)" in capsys.readouterr().err


def test_the_seed_draws_the_prompts(bench: Bench) -> None:
    for seed in ("1", "1", "2"):
        bench.results("latency", "--num-iters-warmup", "0", "--num-iters", "1", *BATCH, "--seed", seed)
    first, second, third = (bench.requests[i].prompt for i in (0, 2, 4))
    assert first == second != third


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--input-len", "200", "--output-len", "57"],
            r"at most --max-model-len \(256\) together; got 200 \+ 57 = 257; ask for less, or raise --max-model-len$",
        ),
        (
            ["--max-model-len", "99", "--output-len", "68"],
            r"\(99\) together; got 32 \+ 68 = 100; ask for less, or raise --max-model-len if the model takes more$",
        ),
        (["--batch-size", "0"], "--batch-size must be at least 1; got 0"),
        (["--batch-size", "1000001"], "--batch-size must be at most 1000000; got 1000001"),
        (["--output-json", "a" * 300], "--output-json must be a file that can be written"),
        (["--profile", "--profile-result-dir", "/dev/null"], "--profile-result-dir must be a folder that can be made"),
        (["--input-len", "0"], "--input-len must be at least 1; got 0"),
        (["--output-len", "0"], "--output-len must be at least 1; got 0"),
        (["--num-iters", "0"], "--num-iters must be at least 1; got 0"),
        (["--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0; got -1"),
        (["--n", "0"], "--n must be an int from 1 to 128; got 0"),
        (["--output-json", "/dev/null/results.json"], "--output-json must be a file that can be written"),
        (["--no-such-flag", "1"], "--no-such-flag"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert bench.run("latency", "--model", "any", *arguments) == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(words, error), error
    assert bench.requests == []
    assert bool(bench.configs) == (arguments[:2] == ["--input-len", "200"])  # else refused before a model is loaded


def test_answers_that_are_cut_short_give_no_numbers(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with bench.spoilt(None):
        assert bench.run(*SHORT, *BATCH, "--model", "any", "--output-json", str(bench.output)) == 1
    shown = capsys.readouterr()
    assert "no number is reported: request 0 was to get 5 tokens and got 0 (error)" in shown.err
    assert shown.out == ""
    assert not bench.output.exists()


def test_an_interrupt_ends_it_with_130_and_no_traceback(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with bench.spoilt(KeyboardInterrupt()):
        assert bench.run(*SHORT, *BATCH, "--model", "any", "--output-json", str(bench.output)) == 130
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not bench.output.exists()


def test_a_profile_is_written_after_the_warm_up_and_nothing_timed(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    flags = ("--profile", "--profile-result-dir", str(folder), "--output-json", str(bench.output))
    assert bench.run(*SHORT, *BATCH, "--model", "any", *flags) == 0
    assert len(bench.requests) == 2 * (2 + 1)
    assert [path for path in folder.rglob("*") if path.name.endswith(".xplane.pb")]
    assert capsys.readouterr().out == f"Profile of one iteration: {folder}\n"
    assert not bench.output.exists()


@pytest.mark.parametrize("drafts", ["0", "2"])
def test_random_weights_of_a_folder_with_a_config_alone_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, drafts: str
) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    output = tmp_path / "results" / "latency.json"
    asked = ("--model", str(tmp_path), "--load-format", "dummy", "--speculative-tokens", drafts, *BATCH, *SMALL)
    iterations = ("--num-iters-warmup", "1", "--num-iters", "2")
    assert run_command(monkeypatch, "bench", "latency", *asked, *iterations, "--output-json", str(output)) == 0
    found = json.loads(output.read_text())
    check_times(found, 2)
    assert found["compilations"] == 0
    assert found["prefix_cache_hit_rate"] == 0
    assert (found["tokens_per_verify"] > 0) == (drafts != "0")
    assert "tokenizer: none in" in capsys.readouterr().err
