"""The command line: answers on standard output, everything else on standard error, one line for a mistake."""

import json
import sys

import pytest
from oracles.engine_rig import TINY

from gdn_jax.serving.__main__ import main

SMALL = ("--max-model-len", "512", "--max-num-seqs", "1", "--max-num-batched-tokens", "256", "--dtype", "float32")


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gdn-jax", *arguments])
    main()


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


def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "generate", "--model", str(tmp_path / "absent"), "--prompt", "x", "--quiet")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("gdn-jax: ")
    assert "absent" in error
