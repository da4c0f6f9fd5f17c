"""Whole documents in one pass, as training runs them: equal to prefill and drafting with slots and pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import SMALL, Span, Steps, Window
from oracles.checkpoints import write_checkpoint

from gdn_jax.model import load_model

DEPTH = 3
LENGTHS = (70, 1, 2, 77)  # documents of the first row; the second is one document
DOCUMENT = np.stack([np.repeat(np.arange(4), LENGTHS), np.zeros(150)]).astype(np.int32)
IDS = np.random.RandomState(0).randint(0, 97, (2, 150)).astype(np.int32)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # as for prefill: float32 sums in another order, after a norm


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Steps:
    # Every token takes every expert: a near tie among experts would be no difference of this pass.
    sizes = {**SMALL, "num_experts": 3, "num_experts_per_tok": 3}
    return Steps(load_model(write_checkpoint(tmp_path_factory.mktemp("model"), "next-moe", seed=1, **sizes)))


@pytest.fixture(scope="module")
def passed(steps) -> tuple[np.ndarray, list[np.ndarray]]:
    """Hidden vectors and the head's outputs of both rows."""
    graph, params = nnx.split(steps.model)

    @jax.jit
    def run(params: nnx.State) -> tuple[jax.Array, list[jax.Array]]:
        model = nnx.merge(graph, params)
        document = jnp.asarray(DOCUMENT)
        hidden = model.decoder.forward(jnp.asarray(IDS), document)
        return hidden, model.mtp.forward(model.decoder.embed_tokens(jnp.asarray(IDS)), hidden, document, depth=DEPTH)

    hidden, outputs = run(params)
    return np.asarray(hidden), [np.asarray(output) for output in outputs]


def documents() -> list[tuple[int, int, int]]:
    """Return (row, first token, end) of every document."""
    at = np.cumsum([0, *LENGTHS])
    return [(0, int(at[i]), int(at[i + 1])) for i in range(4)] + [(1, 0, 150)]


def test_hidden_vectors_are_those_of_a_prefill_of_each_document(steps, passed):
    for row, start, end in documents():
        (output,), _ = steps.prefill(steps.pools(), Span(tokens=IDS[row, start:end], pages=(1, 2, 3), write=1))
        np.testing.assert_allclose(passed[0][row, start:end], output.hidden, **CLOSE)


@pytest.mark.parametrize("last", [2, 5, 63, 64, 76])
def test_outputs_of_the_head_are_those_of_drafting_from_there(steps, passed, last):
    """Feed the head the true tokens after its entries up to token `last`, as if it had drafted them."""
    hidden, outputs = passed
    start = LENGTHS[0] + LENGTHS[1] + LENGTHS[2]
    ids, hidden = IDS[0, start:], hidden[0, start:]
    entries = Span(tokens=ids[1 : last + 1], pages=(1, 2), start=1)
    (output,), state = steps.mtp_prefill(steps.pools(), entries, hidden=[hidden[:last]])
    fed = output.hidden[-1:]
    for depth in range(DEPTH):
        np.testing.assert_allclose(outputs[depth][0, start + last + depth], fed[0], **CLOSE, err_msg=f"depth {depth}")
        if last + depth + 1 == len(ids):
            return
        token = ids[last + depth + 1]
        window = Window(tokens=[token], pages=(1, 2), lane=0, read=0, write=0, folded=last + depth + 1)
        (output,), state = steps.mtp_advance(state, window, hidden=[fed])
        fed = output.hidden


def test_outputs_where_a_draft_means_nothing_are_finite(passed):
    assert all(np.all(np.isfinite(output)) for output in passed[1])
