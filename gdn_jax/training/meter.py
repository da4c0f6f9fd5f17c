"""How fast a run is, for the progress bar."""

import time

import jax
import numpy as np

from gdn_jax.config import ModelConfig
from gdn_jax.training.config import TrainConfig
from gdn_jax.training.flops import flops_per_token, peak_flops
from gdn_jax.training.parameters import Layout


class Meter:
    """Tokens per second since the last restart, without the first step, which compiles."""

    def __init__(self, config: TrainConfig, model: ModelConfig, layout: Layout) -> None:
        """Start counting.

        Args:
            config: of the run.
            model: its sizes.
            layout: its parameters.
        """
        depth = config.loss.mtp_depth * config.loss.mtp_row_share if config.loss.mtp_weight else 0.0
        self._flops = flops_per_token(model, layout, sequence_length=config.data.sequence_length, mtp_depth=depth)
        self._peak = peak_flops(jax.devices()[0].device_kind)
        self._last = time.monotonic()
        self._rates: list[float] = []
        self._is_first = True

    def restart(self) -> None:
        """Leave out what was done since the last step."""
        self._last = time.monotonic()

    def step(self, num_tokens: int) -> float:
        """Note that a step ended; return the seconds since the one before."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if not self._is_first:
            self._rates = [*self._rates[-19:], num_tokens / max(seconds, 1e-9)]
        self._is_first = False
        return seconds

    def text(self) -> str:
        """Return the speed for people."""
        if not self._rates:
            return "compiling"
        rate = float(np.median(self._rates))
        share = f", {100 * rate * self._flops / self._peak:.1f} % of bf16 peak" if self._peak else ""
        return f"{rate:,.0f} tokens/s{share}"
