"""What crosses between host and device is frozen, complete and prints as one line."""

import ast
import pickle

import import_rules
import pytest

from gdn_jax.serving.core.checkpoints import Retention
from gdn_jax.serving.core.plan import Export, Phase, RowCut, RowPlan, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import FinishReason


def row(**fields) -> RowPlan:
    plain = {
        "request_id": "r",
        "phase": Phase.VERIFY,
        "tokens": (7,),
        "num_drafts": 3,
        "emits": True,
        "start": 130,
        "num_replay": 2,
        "lane": 0,
        "table_start": 2,
        "new_blocks": (9,),
        "read_anchor": 4,
        "write_anchor": 5,
        "exports": (Export(boundary=128, slot=6, retention=Retention.ROLLING),),
        "seed": 0,
    }
    return RowPlan(**{**plain, **fields})


def test_a_row_ends_where_its_tokens_and_drafts_end() -> None:
    assert row().end == 134
    assert row(tokens=(), num_drafts=0).end == 130
    assert row(phase=Phase.PREFILL, tokens=tuple(range(64)), num_drafts=0, start=64).end == 128


def test_a_plan_prints_as_one_line_that_says_who_reads_and_writes_what() -> None:
    prefill = row(request_id="s", phase=Phase.PREFILL, num_drafts=0, start=0, num_replay=0, read_anchor=0, exports=())
    plan = StepPlan(index=12, rows=(row(), prefill))
    assert str(plan) == "step 12: r:verify[130:134]+2 4>5 @128>6, s:prefill[0:1]+0 0>5"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (row(), "lane"),
        (StepPlan(index=0, rows=()), "rows"),
        (Export(boundary=64, slot=1, retention=Retention.PLACED), "slot"),
        (RowResult(tokens=(), saved=()), "tokens"),
        (StepResult(rows=()), "rows"),
        (RowCut(num_kept=0), "finish"),
    ],
)
def test_what_crosses_cannot_be_changed_on_the_way(value: object, field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(value, field, 1)


def test_plans_that_are_saved_and_read_back_are_equal() -> None:
    plan = StepPlan(index=3, rows=(row(), row(request_id="s", lane=1)))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert row() == row()
    assert row() != row(lane=1)


def test_results_default_to_a_healthy_row_without_drafts_and_a_cut_that_goes_on() -> None:
    result = RowResult(tokens=(1,), saved=())
    assert (result.num_drafts, result.finite, result.logprobs) == (0, True, ())
    assert RowCut(num_kept=1).finish is None
    assert RowCut(num_kept=1, finish=FinishReason.STOP) != RowCut(num_kept=1)


def test_rows_are_made_by_keyword_alone() -> None:
    """They are named tuples (docs/decisions/0003), so that the language would take fields by position too."""
    made = [
        (module, node)
        for module, source in import_rules.read_tree().sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("RowPlan", "RowResult", "RowCut")
    ]
    assert len(made) >= 5
    assert [f"{module}, line {node.lineno}" for module, node in made if node.args] == []
