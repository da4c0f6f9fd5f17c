"""Delta rule and convolution over rows of whole documents: as the references, and each document as if it were alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.causal_conv1d import causal_conv1d_forward
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs, gdn_forward

LENGTHS = (
    (70, 1, 2, 77),
    (3, 147),
)  # of the documents in each row: shorter than a window, over several chunks
TOKENS, KEY_HEADS, VALUE_HEADS, WIDTH = 150, 2, 4, 16
DOCUMENT = np.stack([np.repeat(np.arange(len(row)), row) for row in LENGTHS]).astype(np.int32)
IS_FIRST = np.diff(DOCUMENT, axis=1, prepend=-1) != 0
IN_JAX = pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])
RNG = np.random.RandomState(0)


def unit(*shape: int) -> jax.Array:
    x = RNG.normal(size=shape)
    return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), jnp.float32)


Q = unit(2, TOKENS, KEY_HEADS, WIDTH)
INPUTS = DeltaInputs(
    k=unit(2, TOKENS, KEY_HEADS, WIDTH),
    v=jnp.asarray(RNG.normal(size=(2, TOKENS, VALUE_HEADS, WIDTH)), jnp.float32),
    g=jnp.asarray(-RNG.exponential(0.1, size=(2, TOKENS, VALUE_HEADS)), jnp.float32),
    beta=jnp.asarray(RNG.uniform(size=(2, TOKENS, VALUE_HEADS)), jnp.float32),
)
X = jnp.asarray(RNG.normal(size=(2, TOKENS, 6)), jnp.float32)
TAPS = jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)


def spans() -> list[tuple[int, int, int]]:
    """Return (row, first token, end) of every document."""
    borders = [(row, np.cumsum([0, *lengths])) for row, lengths in enumerate(LENGTHS)]
    return [(row, int(at[i]), int(at[i + 1])) for row, at in borders for i in range(len(at) - 1)]


def test_the_chunked_rule_equals_token_by_token() -> None:
    got, want = (
        np.asarray(gdn_forward(Q, INPUTS, jnp.asarray(IS_FIRST), implementation=which))
        for which in (Implementation.JAX, Implementation.REFERENCE)
    )
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@IN_JAX
def test_a_document_knows_nothing_of_those_before_it(implementation: Implementation) -> None:
    # What stands before each document is made huge, and must not show.
    for row, start, end in spans()[1:]:
        loud = jax.tree.map(lambda x, start=start: x.at[:, :start].multiply(100.0), INPUTS.v)
        outs = [
            np.asarray(gdn_forward(Q, replace(INPUTS, v=v), jnp.asarray(IS_FIRST), implementation=implementation))
            for v in (INPUTS.v, loud)
        ]
        np.testing.assert_array_equal(outs[0][row, start:end], outs[1][row, start:end])


def test_gradients_equal_those_of_the_reference() -> None:
    weight = jnp.asarray(RNG.normal(size=INPUTS.v.shape), jnp.float32)

    def loss(q: jax.Array, inputs: DeltaInputs, implementation: Implementation) -> jax.Array:
        return jnp.sum(weight * gdn_forward(q, inputs, jnp.asarray(IS_FIRST), implementation=implementation))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    got, want = (gradient(Q, INPUTS, which) for which in (Implementation.JAX, Implementation.REFERENCE))
    for name, a, b in zip(("q", "k", "v", "g", "beta"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max(), name
    assert not np.any(np.asarray(got[1].g)[IS_FIRST])  # a document's first decay has nothing to act on


@IN_JAX
def test_the_convolution_of_a_document_is_that_of_the_document_alone(implementation: Implementation) -> None:
    got = np.asarray(causal_conv1d_forward(X, TAPS, jnp.asarray(DOCUMENT), implementation=implementation))
    for row, start, end in spans():
        padded = np.concatenate([np.zeros((3, 6)), np.asarray(X[row, start:end], np.float64)])
        total = sum(padded[j : j + end - start] * np.asarray(TAPS[:, j]) for j in range(4))
        np.testing.assert_allclose(got[row, start:end], total / (1 + np.exp(-total)), atol=1e-5)
