"""Products of rows with one of many weight matrices: the expert layers of a mixture of experts."""

from jaxtyping import Array, Float, Int

from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.grouped_matmul import plain, reference

__all__ = ["grouped_matmul"]

_GROUPED = {
    Implementation.REFERENCE: reference.grouped_matmul,
    Implementation.JAX: plain.grouped_matmul,
    Implementation.MOSAIC: plain.grouped_matmul,
}


def grouped_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "E N K"],
    group_sizes: Int[Array, "E"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> Float[Array, "M N"]:
    """Multiply each row of x with its group's matrix: y_m = weight[e(m)] x_m, float32 accumulation, x's dtype out.

    Args:
        x: rows sorted by group: the first `group_sizes[0]` rows belong to group 0, and so on.
        weight: one matrix per group, [out, in] as stored.
        group_sizes: rows per group; their sum is at most M.
        implementation: which version computes it.

    Returns:
        The products; zeros for rows past the last group.
    """
    return _GROUPED[implementation](x, weight, group_sizes)
