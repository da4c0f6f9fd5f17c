"""Zeros for the outputs of tokens that no row owns: what some programs of the prefill do beside the rows."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


def fill_gaps(rows: dict[str, Any], out: Any, zeros: Any) -> None:
    """Zero the outputs before, between and after the rows; for inside a kernel.

    Args:
        rows: fields of `PrefillRows`, in global memory.
        out: outputs of one head's columns `[T, columns]`, in global memory.
        zeros: room for some tokens of them `[tokens, columns]` in shared memory, not swizzled.
    """
    size = zeros.shape[0]
    zeros[...] = plgpu.layout_cast(jnp.zeros(zeros.shape, zeros.dtype), plgpu.Layout.WG_STRIDED(zeros.shape, 8))
    plgpu.commit_smem()

    def fill(begin: Array, end: Array) -> None:
        whole = jnp.maximum(lax.div(end - begin, jnp.int32(size)), 0)

        def fill_tokens(index: Array, nothing: None) -> None:
            plgpu.copy_smem_to_gmem(zeros, out.at[pl.ds(begin + index * size, size)])
            return nothing

        def fill_token(token: Array, nothing: None) -> None:
            plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, 1)], out.at[pl.ds(token, 1)])
            return nothing

        lax.fori_loop(0, whole, fill_tokens, None)
        lax.fori_loop(begin + whole * size, end, fill_token, None)

    def fill_before(row: Array, done: Array) -> Array:
        """Fill up to a row that has tokens; returns one past the last token seen to."""
        offset, length = rows["offset"][row], rows["length"][row]
        pl.when(length > 0)(lambda: fill(done, offset))
        return jnp.where(length > 0, offset + length, done)

    fill(lax.fori_loop(0, rows["offset"].shape[0], fill_before, jnp.int32(0)), jnp.int32(out.shape[0]))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the zeros, before the program ends
