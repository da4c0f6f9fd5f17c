"""The audit passes an honest engine and names what is wrong with any other.

Each corruption is done to the arrays of an engine that has answered requests; arrays do not change, so each test puts
the sound ones back by keeping them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from oracles.engine_rig import ask, greedy, make_llm, put_state, random_ids, runner_of, scheduler_of

from gdn_jax import LLM
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.runner.audit import Auditor, AuditSequence
from gdn_jax.state import KVPages, ModelState, RecurrentState

PROMPT = random_ids(3, 140)


class Audited:
    """An engine that has answered, its auditor, and the names and places that it has published."""

    def __init__(self, dtype: str) -> None:
        self.llm: LLM = make_llm(audit=True, dtype=dtype, state_interval=64)
        ask(self.llm, [PROMPT], greedy(56))  # on to 196 tokens: checkpoints of prefill and of decode
        self.holdings = scheduler_of(self.llm).holdings
        self.sound: ModelState = runner_of(self.llm).state

    @property
    def auditor(self) -> Auditor:
        auditor = self.llm._engine._auditor
        assert auditor is not None
        return auditor

    def check(self, **names: Any) -> None:
        """Audit what is published, or what is said to be."""
        found = {"checkpoints": self.holdings.checkpoints.names(), "blocks": self.holdings.blocks.names(), **names}
        self.auditor.check([], checkpoints=found["checkpoints"].items(), blocks=found["blocks"].items())

    def damage(self, kind: type, field: str, place: int, value: float, *, layer: int = 0) -> None:
        """Overwrite one number of one place in the `layer`-th layer of a kind."""
        indices = [index for index, state in enumerate(self.sound.layers) if isinstance(state, kind)]
        layers: list[Any] = list(self.sound.layers)
        pool = getattr(layers[indices[layer]], field)
        first = (place, *[0] * (pool.ndim - 1))
        layers[indices[layer]] = replace(layers[indices[layer]], **{field: pool.at[first].set(value)})
        self.put(replace(self.sound, layers=tuple(layers)))

    def put(self, state: ModelState) -> None:
        put_state(runner_of(self.llm), state)


@pytest.fixture(scope="module")
def engine() -> Audited:
    return Audited("float32")


@pytest.fixture
def audited(engine: Audited) -> Iterator[Audited]:
    engine.check()
    yield engine
    engine.put(engine.sound)
    engine.check()  # and sound again: what was found right is still known to be


def shown(name: bytes) -> str:
    return name.hex()[:16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_run_passes_with_something_to_audit(engine: Audited, dtype: str) -> None:
    """Cold, warm and in a batch: the engine audits after every step, and raises if anything is wrong."""
    audited = engine if dtype == "float32" else Audited(dtype)
    assert len(audited.holdings.blocks.names()) == 3
    assert len(audited.holdings.checkpoints.names()) == 3
    audited.check()
    outputs = ask(audited.llm, [PROMPT, random_ids(4, 70), [*PROMPT[:100], 1, 2, 3]], greedy(4))
    assert outputs[0].num_cached_tokens == 128
    audited.sound = runner_of(audited.llm).state


def test_an_overwritten_key_or_value_is_caught_by_block_and_part(audited: Audited) -> None:
    for field, part in (("k", "keys"), ("v", "values")):
        for name, block in audited.holdings.blocks.names().items():
            audited.damage(KVPages, field, block, 30.0)
            with pytest.raises(
                InvariantError, match=rf"block {shown(name)}, .* in place {block}: layer 3's {part} differs"
            ):
                audited.check()


@pytest.mark.parametrize(("field", "part"), [("recurrent", "recurrent state"), ("conv", "convolution window")])
def test_an_overwritten_checkpoint_is_caught_by_name_layer_and_part(audited: Audited, field: str, part: str) -> None:
    for name, slot in audited.holdings.checkpoints.names().items():
        audited.damage(RecurrentState, field, slot, 30.0, layer=1)
        match = rf"checkpoint {shown(name)}, .* in place {slot}: layer 1's {part} differs"
        with pytest.raises(InvariantError, match=match):
            audited.check()


def test_an_overwritten_hidden_vector_is_caught(audited: Audited) -> None:
    name, slot = next(iter(audited.holdings.checkpoints.names().items()))
    audited.put(replace(audited.sound, hidden=audited.sound.hidden.at[slot, 3].add(0.5)))
    with pytest.raises(InvariantError, match=rf"checkpoint {shown(name)}.*the hidden vector differs"):
        audited.check()


def test_an_error_of_rounding_passes_and_one_well_above_does_not(audited: Audited) -> None:
    """float32 is allowed 1e-4 of the largest number."""
    slot = next(iter(audited.holdings.checkpoints.names().values()))
    scale = float(jnp.abs(audited.sound.hidden[slot]).max())
    for share, caught in ((2e-5, False), (1e-3, True)):
        audited.put(replace(audited.sound, hidden=audited.sound.hidden.at[slot, 3].add(share * scale)))
        if not caught:
            audited.check()
            continue
        with pytest.raises(InvariantError, match=r"at most 0\.0001 is rounding"):
            audited.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_in_an_owned_slot_is_caught(audited: Audited, value: float) -> None:
    name, slot = next(iter(audited.holdings.checkpoints.names().items()))
    audited.damage(RecurrentState, "recurrent", slot, value)
    with pytest.raises(InvariantError, match=rf"checkpoint {shown(name)}.*recurrent state differs .* by (nan|inf)"):
        audited.check()


def test_a_checkpoint_under_the_name_of_another_count_is_caught(audited: Audited) -> None:
    names = dict(audited.holdings.checkpoints.names())
    (first, slot), (second, other) = list(names.items())[:2]
    with pytest.raises(
        InvariantError, match=rf"checkpoint ({shown(first)}|{shown(second)}), after \d+ tokens, in place"
    ):
        audited.check(checkpoints={**names, first: other, second: slot})


def test_a_block_under_the_name_of_another_is_caught(audited: Audited) -> None:
    names = dict(audited.holdings.blocks.names())
    (first, block), (_, other) = list(names.items())[:2]
    with pytest.raises(InvariantError, match=rf"block {shown(first)}.*in place {other}"):
        audited.check(blocks={**names, first: other})
    assert block != other


def test_a_name_whose_tokens_nobody_ran_is_caught(audited: Audited) -> None:
    slot = next(iter(audited.holdings.checkpoints.names().values()))
    with pytest.raises(InvariantError, match=r"checkpoint 00ff0+ is published, and no step ran its tokens"):
        audited.check(checkpoints={**audited.holdings.checkpoints.names(), b"\x00\xff" + bytes(30): slot})


def test_a_sequence_with_another_token_than_was_run_is_caught(audited: Audited) -> None:
    """The names are of the real tokens; an auditor that is told others must find other numbers."""
    runner = runner_of(audited.llm)
    request = [*PROMPT]
    request[5] += 1
    blocks, checkpoints = audited.holdings.blocks.names(), audited.holdings.checkpoints.names()
    names = tuple(list(blocks)[:2])
    fresh = runner.make_auditor()
    with pytest.raises(InvariantError, match=rf"(block|checkpoint) {shown(names[0])}"):
        fresh.check(
            [AuditSequence(tokens=tuple(request), names=names)],
            checkpoints=[(name, slot) for name, slot in checkpoints.items() if name in names],
            blocks=[(name, blocks[name]) for name in names],
        )


def test_the_audit_changes_nothing_in_the_pools(audited: Audited) -> None:
    before = jax.tree.leaves(runner_of(audited.llm).state)
    audited.auditor._right.clear()  # so that all is computed again
    audited.check()
    assert all(a is b for a, b in zip(before, jax.tree.leaves(runner_of(audited.llm).state), strict=True))
