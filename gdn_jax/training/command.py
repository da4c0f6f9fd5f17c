"""`gdn-jax train`: a config file and what the command line puts over it, to a run and how it ended.

Loaded by name when that command is given, since it needs the extra `train`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gdn_jax.training.config_file import read_train_config
from gdn_jax.training.errors import DivergedError
from gdn_jax.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        reason: "finished", "time limit", "interrupted" or "diverged".
        message: one line for people.
    """

    reason: str
    message: str


def train(
    path: str,
    *,
    out: str | None = None,
    text: Sequence[str] = (),
    steps: int | None = None,
    time_limit_s: float | None = None,
    resume: bool = True,
    quiet: bool = False,
) -> Outcome:
    """Run what a TOML file says.

    Args:
        path: of the file.
        out: instead of its run.out.
        text: instead of its data.folders.
        steps: instead of its optimizer.total_steps.
        time_limit_s: instead of its run.time_limit_s.
        resume: see `Trainer`.
        quiet: no progress bars.

    Raises:
        ModelError: what was given cannot be trained with.
    """
    overrides = {
        "run": {"out": out, "time_limit_s": time_limit_s},
        "data": {"folders": list(text) or None},
        "optimizer": {"total_steps": steps},
    }
    given = {
        table: {key: value for key, value in values.items() if value is not None} for table, values in overrides.items()
    }
    config = read_train_config(path, given)
    trainer = Trainer(config, resume=resume, quiet=quiet)
    try:
        reason = trainer.run()
    except DivergedError as error:
        return Outcome(reason="diverged", message=str(error))
    progress = trainer.progress
    return Outcome(
        reason=reason,
        message=f"{reason} after step {progress.step}, {progress.tokens:,} tokens; see {Path(config.run.out)}",
    )
