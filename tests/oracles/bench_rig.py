"""Benchmarks from the command line on an engine that needs no model, and what reached it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from oracles.cli_rig import run_command
from oracles.quick_engine import make_parts, parts_of

from gdn_jax.serving import llm
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.engine_types import EngineRequest
from gdn_jax.serving.startup import EngineParts


@dataclass(kw_only=True)
class Bench:
    """Runs benchmarks.

    Attributes:
        monkeypatch: of the test.
        output: where the results go.
        configs: of the engines started, in order.
        requests: what reached them, in order.
        parts: of the last engine.
    """

    monkeypatch: pytest.MonkeyPatch
    output: Path
    configs: list[EngineConfig] = field(default_factory=list[EngineConfig])
    requests: list[EngineRequest] = field(default_factory=list[EngineRequest])
    parts: EngineParts | None = None

    def run(self, *arguments: str, **sizes: int) -> int:
        """Run `gdn-jax bench` on an engine of some sizes; return the exit code."""
        add = Engine.add

        def build(config: EngineConfig, **options: object) -> EngineParts:
            self.configs.append(config)
            self.parts = make_parts(mode=CacheMode(config.prefix_cache), **sizes)
            return self.parts

        def record(engine: Engine, asked: EngineRequest) -> None:
            self.requests.append(asked)
            add(engine, asked)

        with patch.object(llm, "build_engine", build), patch.object(Engine, "add", record):
            return run_command(self.monkeypatch, "bench", *arguments)

    def results(self, *arguments: str, **sizes: int) -> dict[str, Any]:
        """Run a benchmark that must succeed; return what it wrote."""
        assert self.run(*arguments, "--model", "any", "--output-json", str(self.output), **sizes) == 0
        return json.loads(self.output.read_text())

    @contextmanager
    def spoilt(self, error: BaseException | None) -> Iterator[None]:
        """Let every step raise, or with None spoil its rows' numbers."""
        run = Engine.step

        def step(engine: Engine) -> Any:
            runner = parts_of(engine)[1]
            runner.step_error, runner.is_finite = error, lambda row: False
            return run(engine)

        with patch.object(Engine, "step", step):
            yield
