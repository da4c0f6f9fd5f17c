"""loss.png: what a run's losses did, in nats per token over tokens seen."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gdn_jax.training.checkpoint import Progress

_SMOOTHED = 100  # points of a curve, of about so many means


def plot_losses(path: Path, progress: Progress) -> None:
    """Write the plot: training loss and MTP depths on the left, held-out loss of each domain on the right."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    _plot_training(left, progress)
    _plot_held_out(right, progress)
    for axes, title in ((left, "training text"), (right, "held-out text, next token")):
        axes.set_title(title)
        axes.set_xlabel("million tokens seen")
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    left.set_ylabel("loss, nats per token")
    figure.savefig(path, dpi=120)


def _plot_training(axes: Axes, progress: Progress) -> None:
    if not progress.history:
        return
    tokens = np.array([entry["tokens"] for entry in progress.history]) / 1e6
    size = max(len(tokens) // _SMOOTHED, 1)
    depths = sorted(name for name in progress.history[0] if name.startswith("mtp_"))
    for name in ("next_token", *depths):
        values = np.array([entry[name] for entry in progress.history])
        axes.plot(
            _means(tokens, size), _means(values, size), label=name.replace("mtp_", "MTP depth ").replace("_", " ")
        )


def _plot_held_out(axes: Axes, progress: Progress) -> None:
    tokens = [float(str(entry["tokens"])) / 1e6 for entry in progress.held_out]
    for domain in _domains(progress):
        values = [_losses(entry)[domain]["next_token"] for entry in progress.held_out]
        axes.plot(tokens, values, marker=".", label=domain)


def _domains(progress: Progress) -> list[str]:
    return sorted(_losses(progress.held_out[-1])) if progress.held_out else []


def _losses(entry: dict[str, object]) -> dict[str, dict[str, float]]:
    losses = entry["losses"]
    assert isinstance(losses, dict)
    return losses


def _means(values: np.ndarray, size: int) -> np.ndarray:
    """Return means of `size` neighbours, a shorter rest left out; NaN (of a skipped step) counts for nothing."""
    groups = values[: len(values) // size * size].reshape(-1, size)
    counts = np.isfinite(groups).sum(axis=1)
    sums = np.where(np.isfinite(groups), groups, 0.0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(len(groups), np.nan), where=counts > 0)
