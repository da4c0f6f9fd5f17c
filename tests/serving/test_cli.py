"""The command line: answers on standard output, everything else on standard error, one line for a mistake."""

import io
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from oracles.cli_rig import own_environment
from oracles.cli_rig import run_command as run
from oracles.engine_rig import TINY
from oracles.quick_engine import QuickRunner, make_parts, parts_of

from gdn_jax.serving import command_line, llm
from gdn_jax.serving.__main__ import main

SMALL = ("--max-model-len", "512", "--max-num-seqs", "1", "--max-num-batched-tokens", "256", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _own_environment():
    """The command line is a process's own: here, what it sets goes away again."""
    with own_environment():
        yield


def run_quickly(monkeypatch, *arguments: str, num_drafts: int = 0) -> tuple[int, QuickRunner]:
    """Run `generate` without a model."""
    parts = make_parts(num_drafts=num_drafts)
    monkeypatch.setattr(llm, "build_engine", lambda config, **options: parts)
    return run(monkeypatch, "generate", "--model", "any", *arguments), parts_of(parts.engine)[1]


def test_generate_streams_answers_and_says_how_much_of_a_second_prompt_was_cached(monkeypatch, capsys):
    story = "The river ran past the mill. " * 8
    asked = ("--prompt", story, "--prompt", story + "Then?", "--max-tokens", "4", "--temperature", "0")
    run(monkeypatch, "generate", "--model", str(TINY), *SMALL, *asked)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert "0 of them cached" in shown.err
    cached = int(shown.err.rpartition(" of them cached")[0].rpartition(", ")[2])
    assert cached > 0
    assert cached % 64 == 0


def test_info_prints_what_a_model_is_also_as_json(monkeypatch, capsys):
    run(monkeypatch, "info", "--model", str(TINY), "--json", "--memory-gib", "1")
    report = json.loads(capsys.readouterr().out)
    assert {"model", "parameters", "weights", "state", "kv", "context", "fits"} == set(report)
    run(monkeypatch, "info", "--model", str(TINY))
    assert "3 GDN + 1 attention layers" in capsys.readouterr().out


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_info_ends_with_exit_code_2_where_the_device_cannot_hold_the_model(monkeypatch, capsys, form):
    assert run(monkeypatch, "info", "--model", str(TINY), "--memory-gib", "0.0001", *form) == 2
    shown = capsys.readouterr().out
    assert "not in 0.0001 GiB: weights must fit" in shown
    assert "max_model_len" not in shown
    assert run(monkeypatch, "info", "--model", str(TINY), "--memory-gib", "1", *form) == 0


def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    code = run(monkeypatch, "generate", "--model", str(tmp_path / "absent"), "--prompt", "x", "--quiet")
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("gdn-jax: ")
    assert error.count("\n") == 1
    assert "absent" in error


@pytest.mark.parametrize("flags", [(), ("--quiet",)])
def test_generate_says_what_drafts_brought_to_each_prompt(monkeypatch, capsys, flags):
    asked = ("--prompt", "The river", "--prompt", "The mill", "--max-tokens", "40", "--ignore-eos", *flags)
    assert run_quickly(monkeypatch, *asked, "--speculative-tokens", "3", num_drafts=3)[0] == 0
    told = re.findall(
        r"\[(\S+) tokens per verify: (\d+) of \d+ drafts accepted in (\d+) steps\]", capsys.readouterr().err
    )
    assert len(told) == (0 if flags else 2)
    for per_verify, accepted, steps in told:
        # The first token comes of the prompt, and the last one perhaps of a row without drafts.
        assert 39 - (int(accepted) + int(steps)) in (0, 1)
        assert per_verify == f"{1 + int(accepted) / int(steps):.2f}"


@pytest.mark.parametrize("content", [b"[]", b"\xff\xfe", b"{}"])
def test_info_on_a_config_that_is_none_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert run(monkeypatch, "info", "--model", str(file)) == 2
    error = capsys.readouterr().err
    assert error.startswith("gdn-jax: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "--temperature must be"),
        (["--max-tokens", "0"], "--max-tokens must be"),
        (["--max-tokens", "9999"], "--max-model-len (256)"),
        (["--stop", ""], "--stop must be"),
    ],
)
def test_a_parameter_that_cannot_be_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, words):
    code, _ = run_quickly(monkeypatch, "--prompt", "x", "--quiet", *arguments)
    assert code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_parameter_that_cannot_be_is_refused_before_the_model_is_loaded(monkeypatch, capsys):
    def refuse(config, **options):
        raise AssertionError("too early")

    monkeypatch.setattr(llm, "build_engine", refuse)
    assert run(monkeypatch, "generate", "--model", "any", "--prompt", "x", "--quiet", "--top-p", "7") == 2
    assert "--top-p must be" in capsys.readouterr().err


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_device():
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


@pytest.mark.parametrize(
    ("opened", "code", "words"),
    [
        (closed_pipe, 141, ""),
        (full_device, 1, "gdn-jax: standard output cannot be written: "),
    ],
    ids=["the reader left", "full"],
)
@pytest.mark.parametrize("command", ["generate", "info"])
def test_an_output_that_takes_no_more_ends_the_command_without_a_traceback(
    monkeypatch, capsys, opened, code, words, command
):
    with opened() as output:
        monkeypatch.setattr(sys, "stdout", output)
        if command == "info":
            assert run(monkeypatch, "info", "--model", str(TINY)) == code
        else:
            assert run_quickly(monkeypatch, "--prompt", "x", "--quiet", "--ignore-eos")[0] == code
        output.write("what is left goes nowhere")
        output.flush()
    error = capsys.readouterr().err
    assert error.startswith(words)
    assert error.count("\n") == bool(words)


def test_an_interrupt_during_the_imports_ends_with_130_and_no_traceback(tmp_path):
    slow = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n"
    (tmp_path / "tyro.py").write_text(slow)
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # whatever a parent ignores
        f"sys.path.insert(0, {str(tmp_path)!r}); from gdn_jax.serving.__main__ import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["generate", "--prompt", "x", "--state-interval", "100"],
            "--state-interval must be a multiple of --block-size",
        ),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1; got 0"),
        (["serve", "--port", "99999"], "--port must be in 0..65535; got 99999"),
        (["serve", "--ssl-certfile", "x"], "--ssl-certfile and --ssl-keyfile must be given together"),
        (["bench", "latency", "--batch-size", "0"], "--batch-size must be at least 1; got 0"),
        (["bench", "throughput", "--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1; got 0"),
        (["info", "--memory-gib", "-1"], "--memory-gib must be a positive number"),
        (["info", "--dtype", "float7"], "--dtype must be auto or one of"),
        (["generate", "--prompt", "x", "--max-model-len", "9999"], "--max-model-len must be at most the model's 4096"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line_that_names_its_flag_and_exit_code_2(
    monkeypatch, capsys, arguments, words
):
    assert run(monkeypatch, *arguments, "--model", str(TINY), *(["--quiet"] if arguments[0] != "info" else [])) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gdn-jax: {words}")
    assert error.count("\n") == 1


def test_help_says_what_each_command_is_for(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gdn-jax", "serve", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "Answer HTTP requests in OpenAI's form" in capsys.readouterr().out


def test_an_answer_that_failed_ends_with_exit_code_1_after_the_others(monkeypatch, capsys):
    def spoil_the_first(self, row, result):
        return result._replace(finite=row.request_id != "0")

    monkeypatch.setattr(QuickRunner, "_report", spoil_the_first)
    code, _ = run_quickly(monkeypatch, "--prompt", "ab", "--prompt", "cd", "--max-tokens", "3", "--ignore-eos")
    assert code == 1
    error = capsys.readouterr().err
    assert "0 generated; error]" in error
    assert "3 generated; length]" in error


def test_a_device_that_is_lost_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def lose(self, launched):
        self.reset_error = MemoryError("no room")
        raise RuntimeError("lost")

    monkeypatch.setattr(QuickRunner, "collect", lose)
    code, _ = run_quickly(monkeypatch, "--prompt", "ab", "--quiet")
    assert code == 1
    assert "no room" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("bug", [ValueError("ours"), TypeError("ours"), AssertionError("ours")])
def test_a_bug_is_not_passed_off_as_a_mistake(monkeypatch, bug):
    def slip(self, *anything):
        raise bug

    monkeypatch.setattr(llm.LLM, "stream", slip)
    with pytest.raises(type(bug), match="ours"):
        run_quickly(monkeypatch, "--prompt", "x", "--quiet")


def test_streamed_text_is_written_once_and_whole(monkeypatch, capsys):
    code, _ = run_quickly(monkeypatch, "--prompt", "ab", "--max-tokens", "30", "--temperature", "0", "--ignore-eos")
    assert code == 0
    shown = capsys.readouterr().out
    (output,) = llm.LLM("any", use_tqdm=False).generate(
        "ab", llm.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    assert shown == output.outputs[0].text + "\n"


def test_jax_gets_nearly_the_whole_card_unless_the_user_says_otherwise(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    run(monkeypatch, "info", "--model", str(TINY))
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.4")
    run(monkeypatch, "info", "--model", str(TINY))
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.4"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")  # JAX takes either, and refuses both
    run(monkeypatch, "info", "--model", str(TINY))
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize("prompts", [[], ["--prompt", ""]])
def test_generate_without_a_prompt_is_a_mistake_told_before_anything_is_loaded(
    prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gdn-jax", "generate", "--model", "no-such-folder", *prompts])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "give --prompt TEXT" in capsys.readouterr().err


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def logs_at_every_step(monkeypatch, *arguments: str, is_terminal: bool) -> tuple[str, list[str]]:
    """Return what `generate` shows where both outputs go to one place, and its answers."""
    steps = itertools.count()
    log = logging.getLogger("gdn_jax.test")
    launch = QuickRunner.launch

    def tell(self, plan):
        log.info("step %d", next(steps))
        return launch(self, plan)

    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(QuickRunner, "launch", tell)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    run_quickly(monkeypatch, *arguments, "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    params = llm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [text for flag, text in itertools.pairwise(arguments) if flag == "--prompt"]
    answers = [llm.LLM("any", use_tqdm=False).generate(one, params, use_tqdm=False)[0] for one in prompts]
    return screen.getvalue(), [answer.outputs[0].text for answer in answers]


def test_no_log_line_stands_in_an_answer_on_the_same_terminal(monkeypatch):
    shown, answers = logs_at_every_step(monkeypatch, "--prompt", "ab", "--prompt", "cd", is_terminal=True)
    assert len(answers) == 2
    for answer in answers:
        assert f"\n{answer}\n" in shown
        assert not re.search(r"I step \d", answer)
    numbers = [int(number) for number in re.findall(r"^I step (\d+)$", shown, re.MULTILINE)]
    assert numbers[:12] == list(range(12))  # none is lost, and their order is kept
    # A compilation's line would come with the first decode step.
    assert shown.index("I step 1\n") < shown.index(answers[0]) < shown.index("I step 11\n")


def test_log_lines_that_go_elsewhere_than_the_answer_do_not_wait_for_it(monkeypatch):
    shown, (answer,) = logs_at_every_step(monkeypatch, "--prompt", "ab", is_terminal=False)
    assert answer not in shown
    assert "I step 9\n" in shown


def test_an_answer_that_is_cut_off_ends_its_line_before_what_waited(monkeypatch):
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", screen)
    handler = command_line._BetweenAnswers(screen)

    def cut_off() -> None:
        with handler.answer():
            command_line._write("Bees")
            handler.handle(logging.makeLogRecord({"msg": "log"}))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert screen.getvalue() == "Bees\nlog\n"
