"""The command line: `gdn-jax generate`, `gdn-jax info`. The one place that sets up logging."""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gdn_jax.serving.config import EngineConfig

_LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; what is left out follows the model's generation_config.json.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token.
        top_p: keep the fewest tokens whose probabilities sum to this.
        top_k: keep this many likeliest tokens; 0 keeps all.
        sampling_seed: equal seeds give equal tokens.
        stop: strings that end the answer.
        ignore_eos: do not end at the model's end tokens.
    """

    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    sampling_seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate text from prompts, streaming it to the terminal.

    Attributes:
        prompt: a prompt; give it several times to run several, one after the other, on one cache.
        chat: treat each prompt as a user message and render the model's chat template.
        verbose: log every step.
    """

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]]
    engine: Annotated[EngineConfig, tyro.conf.arg(name="")]
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    chat: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Info:
    """Say what a model is, what it needs, and what fits.

    Attributes:
        model: folder with config.json; weights are not needed.
        memory_gib: memory of a device, for "what fits".
        dtype: of weights and activations.
        json: print JSON.
    """

    model: str
    memory_gib: float = 139.0
    dtype: str = "auto"
    json: bool = False


Command = Annotated[Generate, tyro.conf.subcommand("generate")] | Annotated[Info, tyro.conf.subcommand("info")]


def main() -> None:
    """Run the command line."""
    command = tyro.cli(Command, prog="gdn-jax", config=(tyro.conf.FlagConversionOff,))
    print(command)
