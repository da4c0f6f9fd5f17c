"""Results of benchmarks as a file: its command can be run again, and it says what peers were."""

import json
from pathlib import Path

import pytest

from benchmarks import results_file
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


def test_packages_that_peers_were_loaded_from_stand_among_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "_PEERS", ("pytest", "a_peer_that_is_not_here"))
    write_results(tmp_path / "results.json", "suite", [])
    versions = json.loads((tmp_path / "results.json").read_text())["versions"]
    assert versions["pytest"] == pytest.__version__
    assert {"jax", "numpy"} <= set(versions)
    assert "a_peer_that_is_not_here" not in versions
