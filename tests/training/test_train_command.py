"""`gdn-jax train`: what the command line puts over the file, what it refuses, and its exit codes."""

import sys
from types import SimpleNamespace

import import_rules
import pytest
from training.test_train_config import MINIMAL

from gdn_jax.serving import command_line
from gdn_jax.serving.__main__ import main
from gdn_jax.training import command
from gdn_jax.training.errors import DivergedError, TrainingError

TINY_CONFIG = str(import_rules.ROOT / "configs" / "train" / "tiny.toml")


def run(monkeypatch, *arguments: str) -> int:
    """Run the command line; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gdn-jax", "train", *arguments])
    monkeypatch.setattr(command_line, "_let_jax_use_the_card", lambda environment: None)
    monkeypatch.setattr(command_line, "_set_up_logging", lambda command: None)
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


class FakeTrainer:
    """Keeps what it is made of, and ends as it is told."""

    made: SimpleNamespace
    end: str | Exception = "finished"

    def __init__(self, config, **options):
        FakeTrainer.made = SimpleNamespace(config=config, **options)
        self.progress = SimpleNamespace(step=7, tokens=7000)

    def run(self) -> str:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.fixture
def fake(monkeypatch) -> type[FakeTrainer]:
    monkeypatch.setattr(command, "Trainer", FakeTrainer)
    monkeypatch.setattr(FakeTrainer, "end", "finished")
    return FakeTrainer


def test_flags_win_over_the_file(monkeypatch, capsys, fake):
    flags = ("--out", "o", "--text", "a", "--text", "b", "--steps", "500", "--time-limit-s", "2.5", "--no-resume")
    assert run(monkeypatch, "--config", TINY_CONFIG, *flags, "--quiet") == 0
    made, config = fake.made, fake.made.config
    assert (config.run.out, config.data.folders, config.optimizer.total_steps) == ("o", ("a", "b"), 500)
    assert (config.run.time_limit_s, made.resume, made.quiet) == (2.5, False, True)
    assert "finished after step 7, 7,000 tokens; see o" in capsys.readouterr().err


def test_without_flags_the_file_stands(monkeypatch, fake):
    assert run(monkeypatch, "--config", TINY_CONFIG) == 0
    assert fake.made.config == command.read_train_config(TINY_CONFIG)
    assert fake.made.resume is True


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("time limit", 0, "time limit after step 7"),
        ("interrupted", 130, "interrupted after step 7"),
        (DivergedError("not finite"), 1, "not finite"),
        (TrainingError("not that"), 2, "not that"),
    ],
)
def test_how_it_ended_is_the_exit_code_and_one_line(monkeypatch, capsys, fake, end, code, message):
    monkeypatch.setattr(fake, "end", end)
    assert run(monkeypatch, "--config", TINY_CONFIG) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_mistake_in_the_file_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL.replace("out =", "uot ="))
    assert run(monkeypatch, "--config", str(tmp_path / "run.toml")) == 2
    assert capsys.readouterr().err == "gdn-jax: run.uot is not known; the nearest key is run.out; correct it\n"
    assert run(monkeypatch, "--config", str(tmp_path / "absent.toml")) == 2
    assert "absent.toml" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_the_remedy(monkeypatch, capsys):
    def refuse(name: str):
        raise ModuleNotFoundError("No module named 'optax'", name="optax")

    monkeypatch.setattr(command_line, "import_module", refuse)
    assert run(monkeypatch, "--config", TINY_CONFIG) == 2
    said = capsys.readouterr().err
    assert "optax is not installed; in the repository, run make setup, or pip install '.[train]'" in said
