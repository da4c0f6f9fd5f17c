"""Results of benchmarks as a file: its command can be run again."""

import json
from pathlib import Path

import pytest

from benchmarks.results_file import write_results


@pytest.mark.parametrize(
    ("flags", "begin"),
    [
        ("", "python -m "),
        ("--xla_a=1", "XLA_FLAGS=--xla_a=1 python -m "),
        # A shell sets no variable whose name is quoted.
        ("--xla_a=1 --xla_b=2", "XLA_FLAGS='--xla_a=1 --xla_b=2' python -m "),
    ],
)
def test_the_compilers_flags_stand_before_the_command_as_a_shell_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, begin: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    write_results(tmp_path / "results.json", "suite", [])
    assert json.loads((tmp_path / "results.json").read_text())["command"].startswith(begin)
