"""Joined projections: the same model with fewer matrices, in every way through it."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from oracles.runner_rig import small_model

from gdn_jax.joined import join_projections
from gdn_jax.linear import JoinedLinear, Linear
from gdn_jax.model import LanguageModel

TOKENS = [5, 9, 2, 7, 7, 1, 3]


def matrices(model: LanguageModel) -> int:
    return sum(leaf.ndim >= 2 for leaf in jax.tree.leaves(nnx.state(model)))


def elements(model: LanguageModel) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_joined_layer_makes_the_products_of_its_parts() -> None:
    parts = [Linear(6, width, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(width)) for width in (3, 5, 2)]
    x = jax.random.normal(jax.random.key(0), (4, 6))
    joined = JoinedLinear(parts)(x)
    assert [product.shape for product in joined] == [(4, 3), (4, 5), (4, 2)]
    for product, part in zip(joined, parts, strict=True):
        np.testing.assert_allclose(product, part(x), rtol=1e-6, atol=1e-6)


def test_rows_of_zeros_fill_a_joined_matrix_up_and_no_part_holds_them() -> None:
    parts = [Linear(6, width, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(width)) for width in (3, 5)]
    joined, x = JoinedLinear(parts, multiple_of=16), jax.random.normal(jax.random.key(0), (4, 6))
    assert joined.weight.shape == (16, 6)
    assert [product.shape for product in joined(x)] == [(4, 3), (4, 5)]
    np.testing.assert_array_equal(joined.product(x)[:, 8:], 0.0)
    np.testing.assert_array_equal(joined.product(x)[:, :8], jnp.concatenate(joined(x), axis=1))


def test_a_joined_model_has_the_same_numbers_in_fewer_matrices_and_the_same_logits() -> None:
    model, joined = small_model(), small_model()
    join_projections(joined)
    gdn = sum(kind == "linear_attention" for kind in model.config.layer_types)
    attention = len(model.config.layer_types) - gdn + (model.mtp is not None)
    dense = gdn + attention
    assert matrices(model) - matrices(joined) == 3 * gdn + 2 * attention + dense
    padding = elements(joined) - elements(model)
    assert 0 <= padding < gdn * model.config.linear_value_dim * model.config.hidden_size
    np.testing.assert_allclose(joined.logits(TOKENS), model.logits(TOKENS), rtol=1e-5, atol=1e-5)


def test_a_joined_model_runs_whole_documents_too() -> None:
    model, joined = small_model(), small_model()
    join_projections(joined)
    ids, document = jnp.asarray([TOKENS], jnp.int32), jnp.asarray([[0, 0, 0, 1, 1, 1, 1]], jnp.int32)
    want, got = (each.decoder.forward(ids, document) for each in (model, joined))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
