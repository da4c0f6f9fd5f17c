"""Rows of packed documents: `document[row, t]` says which document of its row a token belongs to; none is below 0."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def same_document(document: Int[Array, "rows T"], back: int) -> Bool[Array, "rows T"]:
    """Return whether the token `back` places before is of the same document; before a row's start there is none."""
    before = jnp.pad(document, ((0, 0), (back, 0)), constant_values=-1)[:, : document.shape[1]]
    return before == document
