"""The one format of benchmark results: a JSON file per suite, with what is needed to measure again.

`{"suite", "device", "date", "commit", "versions", "command", "rows": [{"case", "metric", "value", "unit",
"implementation", "error"}]}`; `error` is the relative error of the check that ran before the timing.
"""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        case: what was measured, e.g. "prefill/16x32/1x8192".
        metric: e.g. "us" or "ratio".
        value: the median.
        unit: of the value.
        implementation: "ours", or a peer's name.
        error: relative error of the check before the timing.
    """

    case: str
    metric: str
    value: float
    unit: str
    implementation: str = "ours"
    error: float | None = None


def write_results(path: Path, *, suite: str, rows: Sequence[Row]) -> None:
    """Write a suite's rows, and print them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "suite": suite,
        "device": _device(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "jaxlib", "flax")},
        },
        "command": shlex.join(["python", *sys.argv]),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    for row in rows:
        sys.stdout.write(f"{row.case:44} {row.metric:8} {row.value:12.4g} {row.unit:4} {row.implementation}\n")


def _device() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU, {_cpu_model()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
