"""The tests tested: every deliberate fault is caught, and without a fault the same checks pass."""

import pytest
from faults import FAULTS, Fault
from random_sessions import play


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_deliberate_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.apply(monkeypatch)
    with pytest.raises(AssertionError):
        fault.caught_by()


def test_without_a_fault_every_check_passes() -> None:
    for check in dict.fromkeys(fault.caught_by for fault in FAULTS):
        check()


def test_there_are_many_faults_and_each_has_its_own_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


def test_the_random_sessions_visit_everything() -> None:
    seen = play(range(30))
    visited = ["hit_tokens", "gap_tokens", "preemptions", "saves", "saves_skipped", "evictions", "accepted"]
    visited += ["closing", "take-over", "aborts", "resets", "failures", "broken", "ahead", "in vain"]
    assert {name for name in visited if seen[name] == 0} == set()
