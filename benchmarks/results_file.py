"""Results of a benchmark suite as one JSON file: the numbers, and what is needed to judge and repeat them."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import packages_distributions, version
from pathlib import Path

from gdn_jax.serving.bench.report import device_name, package_versions

_PEERS = ("torch", "fla", "flash_qla", "jla")  # modules that others' kernels come from


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
        "versions": package_versions() | _peer_versions(),
        "command": _command(),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _peer_versions() -> dict[str, str]:
    """Return the versions of the packages that peers came from, those of which a module was loaded."""
    owners = packages_distributions()
    return {name: version(name) for module in _PEERS if module in sys.modules for name in owners.get(module, ())}


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


def _command() -> str:
    """Return the command line, with the compiler's flags before it if the environment sets any."""
    flags = os.environ.get("XLA_FLAGS")
    command = ["python", "-m", _module_name(), *sys.argv[1:]]
    return (f"XLA_FLAGS={shlex.quote(flags)} " if flags else "") + shlex.join(command)


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).name
