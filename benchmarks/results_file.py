"""Results of a benchmark suite as one JSON file: the numbers, and what is needed to judge and repeat them."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

_PACKAGES = ("gdn-jax", "jax", "jaxlib", "flax", "numpy")


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One number.

    Attributes:
        case: name of the shape or workload.
        metric: what was measured, for instance "median".
        value: the number.
        unit: its unit; "ratio" for a quotient of two times.
        implementation: "ours", a kernel implementation of ours, or a peer.
        error: relative error of the check that ran before the timing; None where nothing is computed to check.
    """

    case: str
    metric: str
    value: float
    unit: str
    implementation: str
    error: float | None


def write_results(path: Path, suite: str, rows: Sequence[ResultRow]) -> None:
    """Write a suite's rows with device, date, commit, versions and the command line; replaces the file."""
    document = {
        "suite": suite,
        "device": device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "command": shlex.join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def device_name() -> str:
    """Return the accelerator's kind and count, or the processor's model name and number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit, with "-dirty" if tracked files differ from it; "unknown" outside git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        is_dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("rev-parse", "HEAD") + ("-dirty" if is_dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).name
