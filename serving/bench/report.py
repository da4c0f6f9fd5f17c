"""What a benchmark found, and on what: the lines that are printed and the object that goes to a file of JSON.

Keys that vLLM's files have stand at the top, and beside them what is needed to judge the numbers and get them again.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from gdn_jax.serving.config import SettingError
from gdn_jax.serving.engine_types import EngineStats
from gdn_jax.serving.llm import LLM

_LOG = logging.getLogger(__name__)
_PACKAGES = ("gdn-jax", "jax", "jaxlib", "flax", "numpy")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a benchmark found.

    Attributes:
        lines: for people.
        values: for programs, by name; empty if nothing was timed.
    """

    lines: tuple[str, ...]
    values: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class EngineWork:
    """What an engine did between two moments, beside computing.

    Attributes:
        prefix_cache_hit_rate: share of the tokens looked up that came from the cache.
        tokens_per_verify: tokens that a row with drafts emitted on average; 0 without such rows.
        compilations: steps compiled.
    """

    prefix_cache_hit_rate: float
    tokens_per_verify: float
    compilations: int

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> "EngineWork":
        """Subtract counts; warns if steps were compiled, which the times then hold."""
        queried = after.queried_tokens - before.queried_tokens
        work = cls(
            prefix_cache_hit_rate=(after.hit_tokens - before.hit_tokens) / queried if queried else 0.0,
            tokens_per_verify=after.tokens_per_verify_since(before),
            compilations=after.compilations - before.compilations,
        )
        if work.compilations:
            _LOG.warning(
                "%d steps were compiled in the time measured, which is too long by that; warm up more, or compile all "
                "steps first with --warm-up True",
                work.compilations,
            )
        return work

    def lines(self) -> tuple[str, ...]:
        """Say what there was."""
        lines: list[str] = []
        if self.prefix_cache_hit_rate:
            lines.append(f"Prefix cache hit rate: {self.prefix_cache_hit_rate:.1%}")
        if self.tokens_per_verify:
            lines.append(f"Tokens per verify: {self.tokens_per_verify:.2f}")
        return tuple(lines)


def measured_with(llm: LLM, work: EngineWork) -> dict[str, object]:
    """Return what a reader of the numbers must know."""
    return {
        **asdict(work),
        "device": device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "kernels": str(llm.kernels.implementation),
        "max_num_seqs": llm.memory.max_num_seqs,
        "max_model_len": llm.max_model_len,
        "settings": asdict(llm.config),
    }


def device_name() -> str:
    """Return the accelerator's kind and count, or the processor's model name and number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that numbers depend on, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_writable(path: str) -> None:
    """Check before a long run that its results can be written; makes the folder.

    Raises:
        SettingError: they cannot.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        usable = not file.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK)
    except OSError as error:
        raise SettingError(f"output_json must be a file that can be written; got {path}: {error}") from error
    if not usable:
        raise SettingError(f"output_json must be a file that can be written; got {path}; name another one")


def check_folder(path: str) -> None:
    """Check before a long run that its profile has a folder; makes it.

    Raises:
        SettingError: it cannot be made, or not be written to.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK)
    except OSError as error:
        raise SettingError(f"profile_result_dir must be a folder that can be made; got {path}: {error}") from error
    if not usable:
        raise SettingError(f"profile_result_dir must be a folder that can be written to; got {path}; name another one")


def write_json(path: str, values: Mapping[str, object]) -> None:
    """Write an object as JSON; replaces the file.

    Raises:
        SettingError: it cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(values, indent=4) + "\n")
    except OSError as error:
        raise SettingError(f"output_json must be a file that can be written; got {path}: {error}") from error
