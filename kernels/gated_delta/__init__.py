"""Gated delta rule: the recurrent core of a GDN layer, as paged prefill, dual-anchor advance and whole documents.

Per value head h, with key head h // (Nv / Nk), state S [dk, dv] in float32 (stored transposed, `[dv, dk]`):

    S <- exp(g_t) S;   e = v_t - S^T k_t;   S <- S + k_t (beta_t e)^T;   o_t = S^T q_t

q and k arrive l2-normalised, q scaled (`delta_inputs` makes them); g is the log decay, at most 0.
`reference.py` runs this token by token and defines the meaning; `chunked.py` is the plain-JAX version;
`mosaic_advance.py` and `mosaic_prefill.py` are Pallas kernels for Hopper GPUs, which have tiles of their own in
`tiles.py`.
"""

from functools import partial

import jax
from jaxtyping import Array, Bool, Float

from gdn_jax.kernels.agreement import Described, check_agreement, check_groups
from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation, imported_when_called, on_tensor_cores
from gdn_jax.kernels.gated_delta import chunked, reference
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs, delta_inputs

__all__ = ["DeltaInputs", "delta_inputs", "gdn_advance", "gdn_forward", "gdn_prefill"]

_PREFILL = {
    Implementation.REFERENCE: reference.gdn_prefill,
    Implementation.JAX: chunked.gdn_prefill,
    Implementation.MOSAIC: on_tensor_cores(
        "gdn_jax.kernels.gated_delta.mosaic_prefill", "gdn_prefill", chunked.gdn_prefill
    ),
}
_ADVANCE = {
    Implementation.REFERENCE: reference.gdn_advance,
    Implementation.JAX: chunked.gdn_advance,
    Implementation.MOSAIC: imported_when_called("gdn_jax.kernels.gated_delta.mosaic_advance", "gdn_advance"),
}
_FORWARD = {
    Implementation.REFERENCE: reference.gdn_forward,
    Implementation.JAX: chunked.gdn_forward,
    Implementation.MOSAIC: chunked.gdn_forward,
}


@partial(jax.jit, static_argnames="implementation")
def gdn_prefill(
    q: Float[Array, "T Nk dk"],
    inputs: DeltaInputs,
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run packed spans through the delta rule, from and into state slots, exporting at grid boundaries.

    The chunk grid is absolute: chunk c covers positions [CHUNK c, CHUNK (c + 1)) of a sequence whatever the span, so
    a span cut on the grid computes the same numbers as the whole; a misaligned start has a short first chunk.
    State, gates and the triangular inverse are float32; operands of large products keep their own dtype.

    Args:
        q: queries, l2-normalised and scaled by dk^-0.5, activation dtype.
        inputs: keys, values and gates of the same tokens.
        rows: the packing, the anchors and the exports.
        pool: recurrent states, any floating dtype; cast from and to float32 at the slot.
        implementation: which version computes it.

    Returns:
        Outputs in the dtype of v, zeros for tokens that no row owns; the pool with final and exported states.

    Raises:
        ValueError: sizes or dtypes do not agree.
        UnsupportedKernelError: the Mosaic kernels cannot run these sizes or dtypes.
    """
    check_agreement(
        inputs.described("inputs", "T")
        | {"q": Described(q, "T Nk dk"), "pool": Described(pool, "slots Nv dv dk")}
        | rows.described()
    )
    check_groups("Nv", inputs.v.shape[1], "Nk", q.shape[1])
    return _PREFILL[implementation](q, inputs, rows, pool)


@partial(jax.jit, static_argnames="implementation")
def gdn_advance(
    q: Float[Array, "rows T Nk dk"],
    new: DeltaInputs,
    replay: DeltaInputs,
    rows: AdvanceRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> tuple[Float[Array, "rows T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Fold each row's replay window into its state, then run its new tokens on top; one read, one write.

        S <- pool[read_slot]; fold num_replay tokens of `replay`, storing at save_slot when the count is save_at
        pool[write_slot] <- S;   for t in new tokens: S <- update(S, t), o_t = S^T q_t   (S is dropped then)

    A rejected draft therefore never touches the pool. State arithmetic is float32.

    Args:
        q: queries of the new tokens, as for `gdn_prefill`.
        new: inputs of the new tokens `[rows, T, ...]`; those past `num_new` are ignored.
        replay: inputs of the tokens run since `folded`, `[rows, R, ...]`; those past `num_replay` are ignored.
        rows: the anchors and counts.
        pool: recurrent states.
        implementation: which version computes it.

    Returns:
        Outputs in the dtype of v, zeros past `num_new`; the pool. `rows.saves()` tells which saves were stored.

    Raises:
        ValueError: sizes or dtypes do not agree.
        UnsupportedKernelError: the Mosaic kernels cannot run these sizes or dtypes.
    """
    check_agreement(
        new.described("new", "rows T")
        | replay.described("replay", "rows R")
        | {"q": Described(q, "rows T Nk dk"), "pool": Described(pool, "slots Nv dv dk")}
        | rows.described()
    )
    check_groups("Nv", new.v.shape[2], "Nk", q.shape[2])
    return _ADVANCE[implementation](q, new, replay, rows, pool)


def gdn_forward(
    q: Float[Array, "rows T Nk dk"],
    inputs: DeltaInputs,
    is_first: Bool[Array, "rows T"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> Float[Array, "rows T Nv dv"]:
    """Run rows of whole documents from an empty state, without pools: what training differentiates.

    Args:
        q: queries, as for `gdn_prefill`.
        inputs: keys, values and gates of the same tokens.
        is_first: whether a token begins a document; the state before it is forgotten.
        implementation: which version computes it.

    Returns:
        Outputs in the dtype of v.

    Raises:
        ValueError: sizes or dtypes do not agree.
    """
    described = {"q": Described(q, "rows T Nk dk"), "is_first": Described(is_first, "rows T", dtype="bool")}
    check_agreement(inputs.described("inputs", "rows T") | described)
    check_groups("Nv", inputs.v.shape[2], "Nk", q.shape[2])
    return _FORWARD[implementation](q, inputs, is_first)
