"""Checkpoints of a run: folders `step-NNNNNNNN` that are complete or absent.

Each holds the float32 parameters in the published layout (so `load_model` reads it), the optimizer's moments
(`optimizer*.safetensors`), and `progress.json`: step, history, and the settings it was trained with. A folder is
written under another name and renamed when it is whole.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from gdn_jax.tensor_names import stored_form
from gdn_jax.training.errors import TrainingError
from gdn_jax.training.parameters import Layout
from gdn_jax.training.shards import Tensors, read_tensors, write_json, write_tensors
from gdn_jax.training.step import TrainState

_UNFINISHED = ".unfinished-"
_STEP = re.compile(r"step-\d{8,}")


@dataclass(kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: updates tried so far, the skipped ones too.
        tokens: read so far.
        seconds: spent in training steps; what evaluations and checkpoints took is left out.
        skipped: updates left out, as loss or gradient was not finite.
        history: one entry per step: step, tokens and losses in nats per token.
        held_out: one entry per evaluation: step, tokens, and losses by domain.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    history: list[dict[str, int | float]] = field(default_factory=list)
    held_out: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """Where a run's checkpoints are, and what they must have been trained with.

    Attributes:
        folder: holds the step folders.
        layout: of the parameters.
        published: content of config.json.
        settings: of model, optimizer and batches, as JSON gives them back; a run goes on only with equal ones.
        keep: newest checkpoints that stay.
        most_bytes: of one file.
    """

    folder: Path
    layout: Layout
    published: Mapping[str, object]
    settings: Mapping[str, object]
    keep: int
    most_bytes: int

    def steps(self) -> list[Path]:
        """Return the whole checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name))

    def make(self) -> None:
        """Make the folder, and see that it can be written: a run that cannot keep its work does not begin.

        Raises:
            TrainingError: it cannot.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise _no_room(self.folder, error) from error

    def clear(self) -> None:
        """Delete all checkpoints, whole or not."""
        for path in self.steps():
            shutil.rmtree(path)
        self._clear_unfinished()

    def write(self, state: TrainState, progress: Progress) -> Path:
        """Write a checkpoint, then delete those that are older than the newest `keep`.

        Raises:
            TrainingError: the folder cannot be written, or the disk is full; what was written is deleted.
        """
        target = self.folder / f"step-{progress.step:08d}"
        if target.exists():
            return target
        self._clear_unfinished()  # before there is more: what a killed run left may be what fills the disk
        params, moments = jax.device_get((state.params, _named(state.moments)))
        with whole_folder(target) as unfinished:
            write_tensors(unfinished, "model", stored_tensors(self.layout, params), most_bytes=self.most_bytes)
            write_tensors(unfinished, "optimizer", moments, most_bytes=self.most_bytes)
            write_json(unfinished / "config.json", self.published)
            write_json(unfinished / "progress.json", {**asdict(progress), "settings": dict(self.settings)})
        for path in self.steps()[: -self.keep]:
            shutil.rmtree(path)
        return target

    def _clear_unfinished(self) -> None:
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)

    def read_newest(self, like: TrainState) -> tuple[TrainState, Progress] | None:
        """Return the newest checkpoint; None if there is none.

        Args:
            like: a state of the same shapes; its arrays are not read.

        Raises:
            TrainingError: the checkpoint is of another model or optimizer, or damaged.
        """
        if not self.steps():
            return None
        path = self.steps()[-1]
        try:
            raw = json.loads((path / "progress.json").read_text())
            _compare(path, raw.pop("settings"), self.settings)
            progress = Progress(**raw)
            stored, moments = read_tensors(path, "model"), read_tensors(path, "optimizer")
            params = {name: jnp.asarray(stored[name].reshape(shape)) for name, _, shape, _ in self.layout.leaves}
            restored = [jnp.asarray(moments[name]) for name in _named(like.moments)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, TrainingError):
                raise
            raise TrainingError(
                f"a checkpoint must be whole to go on from; {path}: {error!r}; delete that folder to use the one before"
            ) from error
        tree = jax.tree.structure(like.moments)
        return TrainState(params=params, moments=jax.tree.unflatten(tree, restored)), progress


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `target`, replacing what is there, when the block has ended.

    Raises:
        TrainingError: it cannot be written; `target` is as it was, and nothing is left beside it.
    """
    unfinished = target.with_name(f"{_UNFINISHED}{os.getpid()}-{target.name}")
    try:
        # A killed process may have had this id: in a container each run has the same.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise _no_room(target, error) from error


def _no_room(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"run.out must be a folder with room to write in; {path}: {error}; make room or give another --out"
    )


def stored_tensors(layout: Layout, params: Tensors) -> dict[str, np.ndarray]:
    """Return host arrays in the shapes in which files hold them, by name."""
    return {name: params[name].reshape(stored_form(path, shape)[1]) for name, path, shape, _ in layout.leaves}


def _named(moments: object) -> dict[str, Any]:
    """Return the leaves of the optimizer's state by their place in it, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(moments)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _compare(path: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a checkpoint whose settings differ, by the names of what differs."""
    old, new = _flat(before), _flat(now)
    changed = [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise TrainingError(
            f"a run goes on with the settings it began with; in {path} {'; '.join(changed)}; restore them, give "
            "another --out, or begin anew with --no-resume"
        )


def _flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
