"""Causal grouped-query attention over KV pages.

A page holds the keys and values of one block of `CHUNK` tokens; page index = block id. Page 0 is the null block:
padding may name it, nothing is stored there, and nothing reads it. Token p of a sequence stands at token slot
`block_table[p // CHUNK] * CHUNK + p % CHUNK`.

    o = softmax(q k^T / sqrt(D)) v over keys at positions first_key..own position; query head j reads KV head j // (Hq /
    Hkv)
"""

from jaxtyping import Array, Float, Int

from gdn_jax.kernels.agreement import Described, check_agreement, check_groups
from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation, on_tensor_cores
from gdn_jax.kernels.paged_attention import plain, reference
from gdn_jax.kernels.paged_attention.pages import token_slots, write_pages

__all__ = ["paged_attention_advance", "paged_attention_prefill", "token_slots", "write_pages"]

_PREFILL = {
    Implementation.REFERENCE: reference.paged_attention_prefill,
    Implementation.JAX: plain.paged_attention_prefill,
    Implementation.MOSAIC: on_tensor_cores(
        "gdn_jax.kernels.paged_attention.mosaic_prefill", "paged_attention_prefill", plain.paged_attention_prefill
    ),
}
_ADVANCE = {
    Implementation.REFERENCE: reference.paged_attention_advance,
    Implementation.JAX: plain.paged_attention_advance,
    Implementation.MOSAIC: on_tensor_cores(
        "gdn_jax.kernels.paged_attention.mosaic_advance", "paged_attention_advance", plain.paged_attention_advance
    ),
}


def paged_attention_prefill(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: PrefillRows,
    *,
    first_key: int = 0,
    implementation: Implementation = Implementation.JAX,
) -> Float[Array, "T Hq D"]:
    """Attend from packed spans to all keys of their sequences up to each query's position, cached prefix included.

    The keys and values of the span itself must already be in the pages.

    Args:
        q: queries after norm and rotation; row r's token i stands at position `rows.start[r] + i`.
        k_pages: keys.
        v_pages: values.
        block_tables: block ids in position order, null past a row's end.
        rows: the packing; slots are not used.
        first_key: keys before this position are masked (1 for the MTP layer).
        implementation: which version computes it.

    Returns:
        Outputs in q's dtype (softmax in float32), zeros for tokens that no row owns and for queries with no key.

    Raises:
        ValueError: sizes or dtypes do not agree.
        UnsupportedKernelError: the Mosaic kernels cannot run these sizes or dtypes.
    """
    check_agreement(_described(q, "T", k_pages, v_pages, block_tables) | rows.described())
    check_groups("Hq", q.shape[1], "Hkv", k_pages.shape[2])
    return _PREFILL[implementation](q, k_pages, v_pages, block_tables, rows, first_key)


def paged_attention_advance(
    q: Float[Array, "rows T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: AdvanceRows,
    *,
    first_key: int = 0,
    implementation: Implementation = Implementation.JAX,
) -> Float[Array, "rows T Hq D"]:
    """Attend from each row's window of new tokens; as `paged_attention_prefill`, positions from `rows.positions`.

    Returns:
        Outputs in q's dtype, zeros past `num_new` and for queries with no key.

    Raises:
        ValueError: sizes or dtypes do not agree.
        UnsupportedKernelError: the Mosaic kernels cannot run these sizes or dtypes.
    """
    check_agreement(_described(q, "rows T", k_pages, v_pages, block_tables) | rows.described())
    check_groups("Hq", q.shape[2], "Hkv", k_pages.shape[2])
    return _ADVANCE[implementation](q, k_pages, v_pages, block_tables, rows, first_key)


def _described(q: Array, tokens: str, k_pages: Array, v_pages: Array, block_tables: Array) -> dict[str, Described]:
    """Return arrays with their dimensions, those of the tokens as given."""
    pages = "pages block Hkv D"
    return {
        "q": Described(q, f"{tokens} Hq D"),
        "k_pages": Described(k_pages, pages),
        "v_pages": Described(v_pages, pages),
        "block_tables": Described(block_tables, "rows blocks", dtype="int32"),
    }
