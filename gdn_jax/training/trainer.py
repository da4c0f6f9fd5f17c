"""The training loop: batches in, updates, evaluations and checkpoints out.

Owns the state of a run and its progress. A run that stops for whatever reason but divergence leaves a checkpoint of
exactly its last step; going on from it gives, bit for bit on a CPU, what an unbroken run gives.
"""

import json
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from gdn_jax.config import ModelConfig
from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.checkpoint import CheckpointFolder, Progress
from gdn_jax.training.config import TrainConfig
from gdn_jax.training.corpus import Corpus, Text
from gdn_jax.training.errors import DivergedError, TrainingError
from gdn_jax.training.export import export_model
from gdn_jax.training.meter import Meter
from gdn_jax.training.optimizer import make_optimizer
from gdn_jax.training.packing import Packer, held_out_batches
from gdn_jax.training.parameters import initial_parameters, make_layout
from gdn_jax.training.plot import plot_losses
from gdn_jax.training.prefetch import prefetched
from gdn_jax.training.published import published_config
from gdn_jax.training.step import Metrics, StepSetup, TrainState, evaluation_step, train_step
from gdn_jax.training.stop import StopSignal

_LOG = logging.getLogger(__name__)
_MIB = 2**20


class _Pending(NamedTuple):
    """A step that was sent to the device and whose losses have not been read."""

    step: int
    metrics: Metrics


class Trainer:
    """One run.

    Attributes:
        state: parameters and moments.
        progress: how far the run is.
    """

    def __init__(self, config: TrainConfig, *, resume: bool = True, quiet: bool = False) -> None:
        """Read the text, and make the initial state or read the newest checkpoint.

        Args:
            config: of the run.
            resume: go on from the newest checkpoint in the out folder; False deletes the checkpoints there.
            quiet: no progress bars.

        Raises:
            TrainingError: text, tokenizer, model and checkpoint do not fit, or the out folder cannot be written.
            ConfigError: the model's config is not one.
        """
        self._started = time.monotonic()
        self._config, self._quiet = config, quiet
        self._model_config = config.model_config()
        text = Text(config.tokenizer)
        _check_vocabulary(text, self._model_config)
        data = config.data
        self._corpus = text.read(data.folders, data.weights, cache=data.cache, quiet=quiet)
        self._setup = StepSetup(
            layout=make_layout(self._model_config, config.run.compute_dtype),
            optimizer=config.optimizer,
            loss=config.loss,
            micro_batches=config.batch.micro_batches,
        )
        self._published = published_config(self._model_config, dtype="float32", end_token=text.end_token)
        self._checkpoints = CheckpointFolder(
            folder=Path(config.run.out) / "checkpoints",
            layout=self._setup.layout,
            published=self._published,
            settings=_settings(config, self._published, self._corpus),
            keep=config.run.keep,
            most_bytes=self._most_bytes,
        )
        self._evaluation = self._evaluation_batches()
        self._checkpoints.make()
        if not resume:
            self._checkpoints.clear()
        found = self._checkpoints.read_newest(jax.eval_shape(self._first_state))
        if found is not None:
            _LOG.info("going on after step %d", found[1].step)
        self.state, self.progress = found or (self._first_state(), Progress())

    def run(self, *, stop_after: int | None = None) -> str:
        """Train to the end, or to a stop; write a checkpoint, the plot, and after the last step the final model.

        Args:
            stop_after: stop after this step, as a time limit would.

        Returns:
            Why it stopped: "finished", "time limit" or "interrupted".

        Raises:
            DivergedError: loss or gradient was not finite too often in a row; no checkpoint is written then.
            TrainingError: the out folder takes no more; the checkpoints in it stay.
        """
        total = self._config.optimizer.total_steps
        stop = min(total, stop_after or total)
        with StopSignal() as signal:
            reason = self._train(stop, signal)
        if reason == "finished" and self.progress.step < total:
            reason = "time limit"
        path = self._checkpoints.write(self.state, self.progress)
        _LOG.info("%s after step %d of %d: %s", reason, self.progress.step, total, path)
        out = Path(self._config.run.out)
        plot_losses(out / "loss.png", self.progress)
        if reason == "finished":
            export_model(
                out / "model",
                self.state.params,
                self._model_config,
                published=self._published,
                tokenizer=self._config.tokenizer,
                most_bytes=self._most_bytes,
            )
            _LOG.info("the model is in %s", out / "model")
        return reason

    @property
    def _most_bytes(self) -> int:
        return int(self._config.run.shard_mib * _MIB)

    def _first_state(self) -> TrainState:
        params = initial_parameters(self._model_config, self._config.run.seed)
        return TrainState(params=params, moments=make_optimizer(self._config.optimizer).init(params))

    def _packer(self) -> Packer:
        data = self._config.data
        return Packer(
            self._corpus.train,
            data.weights,
            rows=self._config.batch.rows,
            length=data.sequence_length,
            seed=self._config.run.seed,
        )

    def _evaluation_batches(self) -> dict[str, list[TrainBatch]]:
        batch, data = self._config.batch, self._config.data
        return {
            domain: held_out_batches(
                self._corpus,
                domain,
                rows=batch.rows // batch.micro_batches,
                length=data.sequence_length,
                most_tokens=data.held_out_tokens,
            )
            for domain in self._corpus.held_out
        }

    def _train(self, stop: int, signal: StopSignal) -> str:
        """Take steps until `stop` or a reason to stop earlier, which is returned."""
        run = self._config.run
        bar = tqdm(total=self._config.optimizer.total_steps, initial=self.progress.step, disable=self._quiet)
        meter = Meter(self._config, self._model_config, self._setup.layout)
        bad, pending, saved = 0, None, time.monotonic()
        with bar, prefetched(self._packer().batch, self.progress.step, stop) as batches:
            for step in range(self.progress.step + 1, stop + 1):
                if reason := self._reason_to_stop(signal):
                    return self._closed(pending, bad, bar, meter, reason)
                self.state, metrics = train_step(self._setup, self.state, next(batches))
                # The losses of the step before are read while the device works on this one.
                bad, pending = self._read(pending, bad, bar, meter), _Pending(step, metrics)
                self.progress.step = step
                evaluates = step % run.evaluate_every == 0 or step == self._config.optimizer.total_steps
                saves = run.checkpoint_every and step % run.checkpoint_every == 0
                late = run.checkpoint_seconds and time.monotonic() - saved >= run.checkpoint_seconds
                if evaluates or saves or late:
                    bad, pending = self._read(pending, bad, bar, meter), None
                    if evaluates:
                        self._evaluate()
                    if saves or late:
                        self._checkpoints.write(self.state, self.progress)
                        saved = time.monotonic()
                    meter.restart()
            return self._closed(pending, bad, bar, meter, "finished")

    def _closed(self, pending: _Pending | None, bad: int, bar: tqdm, meter: Meter, reason: str) -> str:
        self._read(pending, bad, bar, meter)
        return reason

    def _reason_to_stop(self, signal: StopSignal) -> str | None:
        limit = self._config.run.time_limit_s
        if signal.is_set:
            return "interrupted"
        return "time limit" if limit and time.monotonic() - self._started >= limit else None

    def _read(self, pending: _Pending | None, bad: int, bar: tqdm, meter: Meter) -> int:
        """Enter a step's losses into the history; return how many steps in a row were skipped."""
        if pending is None:
            return bad
        values = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
        is_finite, targets = values.pop("is_finite") > 0, values.pop("num_targets")
        progress, batch = self.progress, self._config.batch
        num_tokens = batch.rows * self._config.data.sequence_length
        progress.tokens += num_tokens
        progress.seconds += meter.step(num_tokens)
        progress.history.append({"step": pending.step, "tokens": progress.tokens, "targets": targets, **values})
        bar.set_postfix_str(f"loss {values['next_token']:.3f}, {meter.text()}", refresh=False)
        bar.update()
        if is_finite:
            return 0
        progress.skipped += 1
        _LOG.warning("step %d skipped: loss %g, gradient norm %g", pending.step, values["loss"], values["grad_norm"])
        if bad + 1 >= self._config.run.max_bad_steps:
            raise DivergedError(
                f"loss and gradient must be finite; they were not in {bad + 1} steps in a row, "
                f"up to step {pending.step}; begin anew (another --out, or --no-resume) with a lower "
                "optimizer.peak_learning_rate or optimizer.clip_norm"
            )
        return bad + 1

    def _evaluate(self) -> None:
        sent = {
            domain: [evaluation_step(self._setup, self.state.params, jax.device_put(batch)) for batch in batches]
            for domain, batches in self._evaluation.items()
        }
        losses = {domain: _weighed(jax.device_get(parts)) for domain, parts in sent.items()}
        self.progress.held_out.append({"step": self.progress.step, "tokens": self.progress.tokens, "losses": losses})
        shown = ", ".join(f"{domain} {parts['next_token']:.3f}" for domain, parts in losses.items())
        _LOG.info("step %d, held-out nats per token: %s", self.progress.step, shown)


def _weighed(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Return the means of several batches, each counting as much as it has targets."""
    counts = np.array([part["num_targets"] for part in parts], np.float64)
    names = [name for name in parts[0] if name != "num_targets"]
    total = max(float(counts.sum()), 1.0)
    return {name: math.fsum(float(p[name]) * n for p, n in zip(parts, counts, strict=True)) / total for name in names}


def _check_vocabulary(text: Text, model: ModelConfig) -> None:
    if text.vocab_size > model.vocab_size:
        raise TrainingError(
            f"model.vocab_size must be at least the tokenizer's {text.vocab_size}; got {model.vocab_size}; raise it"
        )


def _settings(config: TrainConfig, published: dict[str, object], corpus: Corpus) -> dict[str, object]:
    """Return what a run that goes on must have in common with its beginning, as JSON gives it back."""
    sizes = {name: [len(part.tokens), len(part.starts) - 1] for name, part in sorted(corpus.train.items())}
    settings = {
        "model": {name: value for name, value in published.items() if name != "dtype"},
        "optimizer": asdict(config.optimizer),
        "loss": asdict(config.loss),
        "batch": asdict(config.batch),
        "data": {"weights": dict(config.data.weights), "sequence_length": config.data.sequence_length},
        "text_tokens_and_documents": sizes,
        "run": {"seed": config.run.seed, "compute_dtype": config.run.compute_dtype},
    }
    return json.loads(json.dumps(settings))
