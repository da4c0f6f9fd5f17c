"""The loss of packed documents against plain sums over the logits of each document alone."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles.checkpoints import write_checkpoint

from gdn_jax.model import LanguageModel, load_model
from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.loss import LossOptions, training_loss

LENGTHS = (30, 1, 33)
IDS = jnp.asarray(np.random.RandomState(0).randint(0, 97, (1, 64)), jnp.int32)
BATCH = TrainBatch(token_ids=IDS, document=jnp.asarray(np.repeat(np.arange(3), LENGTHS)[None], jnp.int32))
SIZES = {
    "layer_types": ("full_attention",),  # compiles quickly; the delta rule has tests of its own
    "vocab_size": 97,
    "dtype": "float32",
    "text": False,
}
OPTIONS = LossOptions(mtp_weight=0.3, mtp_depth=2, mtp_soft_share=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LanguageModel:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("model"), "q35-dense-flat", seed=1, **SIZES))


@pytest.fixture(scope="module")
def logits(model) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log probabilities of the model and of the head at every token, from passes that other tests hold to prefill."""
    graph, params = nnx.split(model)

    @jax.jit
    def run(params: nnx.State) -> list[jax.Array]:
        model = nnx.merge(graph, params)
        hidden = model.decoder.forward(IDS, BATCH.document)
        outputs = model.mtp.forward(model.decoder.embed_tokens(IDS), hidden, BATCH.document, depth=2)
        return [jax.nn.log_softmax(model.decoder.logits(x))[0] for x in (hidden, *outputs)]

    main, *heads = (np.asarray(logprobs) for logprobs in run(params))
    return main, heads


def compute(model: LanguageModel, options: LossOptions) -> tuple[float, dict[str, float]]:
    graph, params = nnx.split(model)
    loss, parts = jax.jit(lambda params: training_loss(nnx.merge(graph, params), BATCH, options))(params)
    return loss, {name: float(part) for name, part in parts.items()}


@pytest.fixture(scope="module")
def computed(model) -> tuple[float, dict[str, float]]:
    return compute(model, OPTIONS)


def targets(depth: int) -> list[int]:
    """Return the tokens from which a draft of this depth (0: the model itself) is counted."""
    first = np.cumsum([0, *LENGTHS])[:-1]
    return [t for start, n in zip(first, LENGTHS, strict=True) for t in range(start + depth, start + n - 1)]


def mean(logprobs: np.ndarray, depth: int) -> float:
    return float(-np.mean([logprobs[t, IDS[0, t + 1]] for t in targets(depth)]))


def soft(logprobs: np.ndarray, wanted: np.ndarray, depth: int) -> float:
    return float(-np.mean([np.exp(wanted[t]) @ logprobs[t] for t in targets(depth)]))


def test_the_parts_are_means_over_targets_within_documents(computed, logits):
    main, heads = logits
    loss, parts = computed
    assert parts["num_targets"] == 29 + 0 + 32
    np.testing.assert_allclose(parts["next_token"], mean(main, 0), rtol=1e-5)
    head = 0.0
    for depth, one in enumerate(heads, start=1):
        np.testing.assert_allclose(parts[f"mtp_{depth}"], mean(one, depth), rtol=1e-5)
        head += 0.5 * mean(one, depth) + 0.5 * soft(one, main, depth)
    np.testing.assert_allclose(loss, mean(main, 0) + 0.3 / 2 * head, rtol=1e-5)


def test_without_weight_the_head_is_left_out(model, logits):
    loss, parts = compute(model, replace(OPTIONS, mtp_weight=0.0))
    assert set(parts) == {"next_token", "num_targets"}
    np.testing.assert_allclose(loss, mean(logits[0], 0), rtol=1e-5)


def gradients(model: LanguageModel, loss: Callable[[LanguageModel], jax.Array]) -> dict[tuple, np.ndarray]:
    graph, params = nnx.split(model)
    found = jax.jit(jax.grad(lambda params: loss(nnx.merge(graph, params))))(params)
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(found)}


def test_every_parameter_gets_a_finite_gradient(model):
    for path, values in gradients(model, lambda model: training_loss(model, BATCH, OPTIONS)[0]).items():
        assert np.all(np.isfinite(values)), path
        assert np.any(values), path


def test_the_head_follows_the_model_and_not_the_model_the_head(model, logits):
    """With the soft share alone, gradients are those of a distribution that is a constant."""
    wanted = jnp.exp(logits[0])

    def by_hand(model: LanguageModel) -> jax.Array:
        hidden = model.decoder.forward(IDS, BATCH.document)
        (output,) = model.mtp.forward(model.decoder.embed_tokens(IDS), hidden, BATCH.document, depth=1)
        logprobs = jax.nn.log_softmax(model.decoder.logits(output))[0]
        own = training_loss(model, BATCH, replace(OPTIONS, mtp_weight=0.0))[0]
        return own - 0.3 * (wanted * logprobs)[np.array(targets(1))].sum(axis=-1).mean()

    options = replace(OPTIONS, mtp_depth=1, mtp_soft_share=1.0)
    got = gradients(model, lambda model: training_loss(model, BATCH, options)[0])
    for path, want in gradients(model, by_hand).items():
        np.testing.assert_allclose(got[path], want, atol=1e-4 * np.abs(want).max(), err_msg=str(path))


def test_the_head_may_learn_from_some_rows_alone(model, computed):
    twice = TrainBatch(
        token_ids=jnp.concatenate([IDS, IDS[:, ::-1]]), document=jnp.concatenate([BATCH.document, BATCH.document * 0])
    )
    graph, params = nnx.split(model)
    options = replace(OPTIONS, mtp_row_share=0.5)
    parts = jax.jit(lambda params: training_loss(nnx.merge(graph, params), twice, options)[1])(params)
    alone = computed[1]
    np.testing.assert_allclose(float(parts["mtp_2"]), alone["mtp_2"], rtol=1e-5)  # the first row's
    assert float(parts["num_targets"]) == alone["num_targets"] + 63
