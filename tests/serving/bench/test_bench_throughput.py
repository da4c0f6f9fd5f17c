"""`gdn-jax bench throughput`: the requests that were asked for, all at once, and vLLM's lines and keys."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracles.bench_rig import Bench
from oracles.cli_rig import own_environment, run_command
from oracles.engine_rig import TINY
from oracles.quick_engine import QuickRunner

from gdn_jax.serving.bench.workload import RandomWorkload
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.text.tokenizer import Tokenizer

RANDOM = ("throughput", "--input-len", "9", "--output-len", "5", "--num-prompts", "6", "--num-warmups", "0")
VLLM_KEYS = ["elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    with own_environment():
        yield


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch=monkeypatch, output=tmp_path / "results.json")


def tokenizer_of(bench: Bench) -> Tokenizer:
    assert bench.parts is not None
    return bench.parts.tokenizer


def write_conversations(folder: Path) -> str:
    file = folder / "conversations.json"
    turns = [("What do bees make?", "Bees make honey."), ("Who lives in a hive?", "Many bees do.")]
    file.write_text(json.dumps([{"conversations": [{"value": text} for text in pair]} for pair in turns]))
    return str(file)


def test_the_requests_are_those_that_were_asked_for(bench: Bench) -> None:
    bench.results(*RANDOM)
    assert [(len(request.prompt), request.max_tokens) for request in bench.requests] == [(9, 5)] * 6
    assert all(request.params.ignore_eos for request in bench.requests)
    assert len({tuple(request.prompt) for request in bench.requests}) == 6


def test_keys_and_totals_are_vllms_and_exact(bench: Bench) -> None:
    found = bench.results(*RANDOM)
    assert list(found)[:5] == VLLM_KEYS
    assert (found["num_requests"], found["total_num_tokens"]) == (6, 6 * (9 + 5))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 9, 6 * 5)
    assert found["requests_per_second"] == pytest.approx(6 / found["elapsed_time"])
    assert found["tokens_per_second"] == pytest.approx(84 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(30 / found["elapsed_time"])
    assert {"device", "date", "versions", "kernels", "settings", "command"} <= set(found)


def test_the_lines_are_vllms(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.results(*RANDOM)
    assert capsys.readouterr().out.splitlines() == [
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s",
        "Total num prompt tokens:  54",
        "Total num output tokens:  30",
    ]


def test_a_prompt_with_several_answers_counts_once(bench: Bench) -> None:
    found = bench.results(*RANDOM, "--n", "3")
    assert (found["num_requests"], found["total_input_tokens"], found["total_output_tokens"]) == (6, 54, 90)
    assert len(bench.requests) == 18


def test_all_requests_are_queued_before_the_first_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []
    plan = Scheduler.plan

    def watch(scheduler: Scheduler):
        queued.append(len(bench.requests))
        return plan(scheduler)

    monkeypatch.setattr(Scheduler, "plan", watch)
    bench.results(*RANDOM)
    assert set(queued) == {6}


@pytest.mark.parametrize(
    "flags",
    [
        ("--input-len", "40", "--output-len", "20", "--random-prefix-len", "16"),
        ("--random-input-len", "40", "--random-output-len", "20", "--prefix-len", "16"),
    ],
)
def test_lengths_are_drawn_around_those_given_under_either_of_vllms_names(
    bench: Bench, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    asked = ("throughput", *flags, "--random-range-ratio", "0.25", "--num-prompts", "8", "--seed", "7")
    found = bench.results(*asked, "--num-warmups", "0")
    workload = RandomWorkload(seed=7, input_len=40, output_len=20, range_ratio=0.25, prefix_len=16)
    expected = workload.requests(8, tokenizer_of(bench))
    assert [list(request.prompt) for request in bench.requests] == [request.token_ids for request in expected]
    assert [request.max_tokens for request in bench.requests] == [request.num_answer_tokens for request in expected]
    total = sum(request.lengths.prompt + request.lengths.answer for request in expected)
    assert found["total_num_tokens"] == total
    # The budget lets the first prompt run alone, and the others find its prefix.
    assert found["prefix_cache_hit_rate"] == pytest.approx(7 * 16 / sum(len(one.prompt) for one in bench.requests))
    assert f"Prefix cache hit rate: {found['prefix_cache_hit_rate']:.1%}" in capsys.readouterr().out.splitlines()


def test_answers_have_128_tokens_unless_said_otherwise(bench: Bench) -> None:
    found = bench.results("throughput", "--input-len", "4", "--num-prompts", "1", "--num-warmups", "0")
    assert found["total_output_tokens"] == 128


def test_what_drafts_brought_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.results(*RANDOM, "--output-len", "40", num_drafts=3)
    assert found["tokens_per_verify"] > 1
    assert f"Tokens per verify: {found['tokens_per_verify']:.2f}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("flags", "num_warmups"), [(("--num-warmups", "2"), 2), ((), 6)])
def test_warm_ups_are_not_counted_and_leave_nothing_in_the_cache(
    bench: Bench, flags: tuple[str, ...], num_warmups: int
) -> None:
    """Left out, all requests run once before where no step is compiled, as here none ever is."""
    found = bench.results(*RANDOM[:-2], *flags)
    prompts = [list(request.prompt) for request in bench.requests]
    assert prompts[:num_warmups] == prompts[num_warmups:][:num_warmups]
    assert len(prompts) == num_warmups + 6
    assert (found["num_requests"], found["total_num_tokens"]) == (6, 84)
    assert found["prefix_cache_hit_rate"] == 0


def test_steps_that_are_all_compiled_need_no_warm_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuickRunner, "num_compiled", 5)
    found = bench.results(*RANDOM[:-2])
    assert len(bench.requests) == 6
    assert found["compilations"] == 0


@pytest.mark.parametrize("name", [("--dataset-name", "sharegpt"), ()])
def test_a_file_of_conversations_is_asked(bench: Bench, tmp_path: Path, name: tuple[str, ...]) -> None:
    path = write_conversations(tmp_path)
    found = bench.results("throughput", *name, "--dataset-path", path, "--num-prompts", "2", "--num-warmups", "0")
    tokenizer = tokenizer_of(bench)
    assert {tokenizer.decode(request.prompt) for request in bench.requests} == {
        "What do bees make?",
        "Who lives in a hive?",
    }
    texts = ("What do bees make?", "Who lives in a hive?", "Bees make honey.", "Many bees do.")
    assert found["total_num_tokens"] == sum(len(tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--input-len must be given for random prompts; got none; set it, or --dataset-path"),
        (
            ["--input-len", "200", "--output-len", "57"],
            r"at most --max-model-len \(256\) together; got 200 \+ 57 = 257; ask for less, or raise --max-model-len$",
        ),
        (
            ["--input-len", "90", "--random-prefix-len", "9", "--max-model-len", "99"],
            r"\(99\) together; got 99 \+ 128 = 227",
        ),
        (["--input-len", "9", "--dataset-name", "sonnet"], "--dataset-name must be random or sharegpt; got 'sonnet'"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt must have a file; got none; set --dataset-path"),
        (
            ["--dataset-name", "random", "--dataset-path", "x", "--input-len", "9"],
            "--dataset-path must be left out with",
        ),
        (
            ["--dataset-path", "x", "--input-len", "9"],
            "must be left out with --dataset-name sharegpt, .*; got 9, 0 and",
        ),
        (["--dataset-path", "x", "--output-len", "0"], "--output-len must be at least 1; got 0"),
        (["--dataset-path", "no-such-file"], "--dataset-path must be a file of JSON; got no-such-file"),
        (["--input-len", "9", "--random-range-ratio", "1"], r"--random-range-ratio must be in \[0, 1\); got 1.0"),
        (["--input-len", "9", "--num-prompts", "0"], "--num-prompts must be at least 1; got 0"),
        (["--input-len", "9", "--num-warmups", "-1"], "--num-warmups must be at least 0; got -1"),
        (["--input-len", "9", "--n", "129"], "--n must be an int from 1 to 128; got 129"),
        (["--input-len", "9", "--output-json", "/dev/null/x"], "--output-json must be a file that can be written"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert bench.run("throughput", "--model", "any", *arguments) == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(words, error), error
    assert bench.requests == []


def test_an_interrupt_ends_it_with_130_and_no_traceback(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with bench.spoilt(KeyboardInterrupt()):
        assert bench.run(*RANDOM, "--model", "any") == 130
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_weights_of_a_folder_are_timed_after_everything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "throughput.json"
    asked = ("--input-len", "20", "--output-len", "6", "--num-prompts", "3", "--random-prefix-len", "64")
    sizes = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "256", "--dtype", "float32")
    flags = (*asked, *sizes, "--output-json", str(output), "--quiet")
    assert run_command(monkeypatch, "bench", "throughput", "--model", str(TINY), *flags) == 0
    found = json.loads(output.read_text())
    assert (found["num_requests"], found["total_num_tokens"]) == (3, 3 * (64 + 20 + 6))
    assert found["compilations"] == 0
    # The budget lets the first prompt run alone, and the others find its prefix.
    assert found["prefix_cache_hit_rate"] == pytest.approx(2 * 64 / (3 * 84))
