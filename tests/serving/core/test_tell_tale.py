"""The fake device refuses what a real one would do wrong in silence: races within a step, and what it never wrote."""

from typing import Any

import pytest
from oracles.tell_tale import TellTaleError, TellTaleRunner

from gdn_jax.serving.core.checkpoints import Retention
from gdn_jax.serving.core.plan import Export, Phase, RowPlan, StepPlan


def prefill(name: str, lane: int, blocks: tuple[int, ...], slot: int, **changes: Any) -> RowPlan:
    """Return a row that runs the six tokens of a fresh prompt, in blocks of four."""
    fields: dict[str, Any] = {
        "request_id": name,
        "phase": Phase.PREFILL,
        "tokens": (1, 2, 3, 4, 5, 6),
        "num_drafts": 0,
        "emits": True,
        "start": 0,
        "num_replay": 0,
        "lane": lane,
        "table_start": 0,
        "new_blocks": blocks,
        "read_anchor": 0,
        "write_anchor": slot,
        "exports": (),
        "seed": 0,
    }
    return RowPlan(**fields | changes)


def run(runner: TellTaleRunner, *rows: RowPlan) -> tuple[Any, ...]:
    return runner.run(StepPlan(index=0, rows=rows)).rows


@pytest.fixture
def runner() -> TellTaleRunner:
    return TellTaleRunner(block_size=4, vocabulary=50)


def test_rows_with_pages_and_slots_of_their_own_run(runner: TellTaleRunner) -> None:
    first, second = run(runner, prefill("a", 0, (1, 2), 1), prefill("b", 1, (3, 4), 2))
    assert first == second
    assert runner.slots == {1: (1, 2, 3, 4, 5, 6), 2: (1, 2, 3, 4, 5, 6)}


@pytest.mark.parametrize("order", [1, -1])
def test_two_rows_that_write_one_page_are_refused_even_if_they_write_the_same(runner: TellTaleRunner, order) -> None:
    rows = (prefill("a", 0, (1, 2), 1), prefill("b", 1, (1, 4), 2))[::order]
    with pytest.raises(TellTaleError, match="writes a page that another row writes"):
        run(runner, *rows)


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_that_reads_a_page_which_another_writes_is_refused(runner: TellTaleRunner, order) -> None:
    run(runner, prefill("before", 0, (1, 2), 1, tokens=(1, 2, 3, 4)))
    reader = prefill("a", 1, (1, 3), 2, tokens=(5, 6), start=4, read_anchor=1)
    with pytest.raises(TellTaleError, match="reads a page that another row writes"):
        run(runner, *(reader, prefill("b", 2, (1, 5), 3))[::order])
    runner.tables.clear()
    run(runner, reader, prefill("b", 2, (4, 5), 3))  # without the race it runs


def test_a_state_that_another_row_writes_or_exports_is_not_read(runner: TellTaleRunner) -> None:
    run(runner, prefill("before", 0, (1, 2), 1, tokens=(1, 2, 3, 4)))
    reader = prefill("a", 1, (1, 3), 2, tokens=(5, 6), start=4, read_anchor=1)
    export = Export(boundary=4, slot=1, retention=Retention.PLACED)  # type: ignore[arg-type]
    for other in (prefill("b", 2, (4, 5), 1), prefill("b", 2, (4, 5), 3, exports=(export,))):
        runner.tables.clear()
        with pytest.raises(TellTaleError, match="reads a slot that something else writes"):
            run(runner, reader, other)


def test_what_a_block_lent_anew_held_before_cannot_be_read(runner: TellTaleRunner) -> None:
    """The hit ends after one block; the second is new, and what it holds is right only by chance."""
    run(runner, prefill("before", 0, (1, 2, 3), 1, tokens=(1, 2, 3, 4, 5, 6, 7, 8)))
    longer = prefill("a", 1, (1, 2, 4), 2, tokens=(9,), start=8, read_anchor=1)
    run(runner, longer)  # a hit of both blocks
    runner.slots[1] = (1, 2, 3, 4)
    run(runner, prefill("b", 2, (1, 2, 5), 3, tokens=(5, 6), start=4, read_anchor=1))
    advance = {"phase": Phase.DECODE, "tokens": (8,), "num_replay": 0, "table_start": 3, "new_blocks": (), "start": 7}
    runner.slots[3] = (1, 2, 3, 4, 5, 6, 7)  # position 6 was not run: the stale 7 in page 2 is gone
    with pytest.raises(TellTaleError, match="pages hold"):
        run(runner, prefill("b", 2, (), 3, read_anchor=3, **advance))


def test_what_a_slot_lent_anew_held_before_cannot_be_read(runner: TellTaleRunner) -> None:
    """The slots of an admission and of an export are emptied before the step, and what the row writes comes after."""
    run(runner, prefill("before", 0, (1, 2), 1))
    runner.slots[5] = (1, 2, 3, 4)
    export = Export(boundary=4, slot=5, retention=Retention.PLACED)  # type: ignore[arg-type]
    rows = (prefill("a", 1, (3, 4), 1, tokens=(7, 8, 9, 10, 11), exports=(export,)),)
    runner._empty_what_is_lent_anew(StepPlan(index=0, rows=rows), [[3, 4]])
    assert runner.slots == {}
    run(runner, *rows)
    assert runner.slots == {1: (7, 8, 9, 10, 11), 5: (7, 8, 9, 10)}


def test_what_a_broken_row_wrote_means_nothing(runner: TellTaleRunner) -> None:
    plan = StepPlan(index=0, rows=(prefill("a", 0, (1, 2), 1), prefill("b", 1, (3, 4), 2)))
    result = runner.run(plan, broken="a")
    assert [row.finite for row in result.rows] == [False, True]
    assert set(runner.slots[1]) == set(runner.pages[1].values()) == {-1}
    assert runner.slots[2] == (1, 2, 3, 4, 5, 6)
