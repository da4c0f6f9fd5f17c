"""The rules that conftest.py sets for every test are in force: each would hide mistakes if it were off."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from gdn_jax.kernels.numerics import einsum


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)


def test_silent_rank_promotion_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_an_array_that_breaks_its_annotation_is_refused() -> None:
    einsum("i,i->", jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeCheckError):
        einsum("i,i->", jnp.arange(3), jnp.arange(3))
