"""What is made of a trace's events: kinds by name, their sums, and the time in which nothing ran."""

from pathlib import Path

import pytest

from benchmarks.trace_parts import Event, Part, idle_seconds, kind_of, parts_of, read_events


def event(name: str, start: float, duration: float) -> Event:
    return Event(name=name, start_ns=start, duration_ns=duration)


def test_kinds_are_told_apart_by_name() -> None:
    names = {
        "gdn_advance_inputs_mosaic_gpu_kernel": "gdn inputs",
        "gdn_advance_mosaic_gpu_kernel": "gdn advance",
        "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT": "matrix product",
        "MemcpyD2D": "copy",
        "loop_add_fusion_3": "fusion",
        "something_new": "something_new",
    }
    assert {name: kind_of(name) for name in names} == names


def test_parts_are_sums_by_kind_with_the_longest_first() -> None:
    events = [event("fusion_1", 0, 100), event("gemm_a", 100, 500), event("fusion_2", 700, 200)]
    assert parts_of(events) == [
        Part(kind="matrix product", count=1, seconds=pytest.approx(5e-7)),
        Part(kind="fusion", count=2, seconds=pytest.approx(3e-7)),
    ]


def test_nothing_runs_between_events_that_do_not_overlap() -> None:
    events = [event("c", 700, 100), event("a", 0, 500), event("b", 100, 200), event("d", 800, 50)]
    assert idle_seconds(events) == pytest.approx(2e-7)
    assert idle_seconds([]) == 0.0


def test_a_folder_without_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold a trace"):
        read_events(tmp_path)
