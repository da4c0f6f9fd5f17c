"""What a profiler trace says of a step: how often each kind of kernel was launched, for how long, and the gaps between.

A trace is what `jax.profiler.trace(folder)` leaves in a folder. Kernels are told apart by name.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

# The first pattern that is found in a kernel's name says what it is.
_KINDS = (
    ("gdn inputs", "gdn_advance_inputs"),
    ("gdn advance", "gdn_advance"),
    ("attention", "paged_attention|attention"),
    ("matrix product", "gemm|gemv|nvjet|cutlass|xmma|cublas|dot_"),
    ("copy", "memcpy|memset|copy"),
    ("sort", "sort|top_k|topk"),
    ("fusion", "fusion|loop|wrapped|input_|reduce|transpose|triton"),
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that ran on a device."""

    name: str
    start_ns: float
    duration_ns: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """All events of a kind: how many, and for how long."""

    kind: str
    count: int
    seconds: float


def read_events(folder: Path, plane: str = "/device:GPU:0") -> list[Event]:
    """Return what ran on a device, in the order of its start.

    Args:
        folder: that a trace was written to.
        plane: the device's name in the trace.

    Raises:
        ValueError: the folder holds no trace, or none of that device.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise ValueError(f"{folder} must hold a trace of jax.profiler.trace; there is no *.xplane.pb below it")
    planes = list(ProfileData.from_file(str(files[-1])).planes)
    events = [
        Event(name=event.name, start_ns=event.start_ns, duration_ns=event.duration_ns)
        for found in planes
        if found.name == plane
        for line in found.lines
        if line.name.startswith("Stream")  # other lines repeat these by group
        for event in line.events
    ]
    if not events:
        raise ValueError(f"the trace must hold {plane}; it has {', '.join(found.name for found in planes)}")
    return sorted(events, key=lambda event: event.start_ns)


def parts_of(events: Iterable[Event]) -> list[Part]:
    """Return the kinds of what ran, longest first; what no pattern knows stands under its own name."""
    found: dict[str, list[float]] = {}
    for event in events:
        found.setdefault(kind_of(event.name), []).append(event.duration_ns)
    parts = [Part(kind=kind, count=len(times), seconds=1e-9 * sum(times)) for kind, times in found.items()]
    return sorted(parts, key=lambda part: -part.seconds)


def kind_of(name: str) -> str:
    """Return what a kernel of that name is."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), name)


def idle_seconds(events: Iterable[Event]) -> float:
    """Return for how long nothing ran between the first event and the last one."""
    return 1e-9 * sum(_gaps(sorted(events, key=lambda event: event.start_ns)))


def _gaps(events: Iterable[Event]) -> Iterator[float]:
    end = None
    for event in events:
        if end is not None and event.start_ns > end:
            yield event.start_ns - end
        end = max(end or 0.0, event.start_ns + event.duration_ns)
