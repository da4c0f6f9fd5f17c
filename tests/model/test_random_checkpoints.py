"""Random checkpoints of every family, with sizes that no release has, against the float64 oracle that reads them too.

Each goes the whole way from files to numbers: config and weights through `load_model`, a prompt of odd length through
prefill, more tokens through verify steps of which some drafts are rejected, and the MTP head.
"""

from typing import Any

import numpy as np
import pytest
from model_steps import Span, Steps, Window
from oracles.checkpoints import write_checkpoint
from oracles.numpy_model import OracleModel

from gdn_jax.model import load_model

GDN, FULL = "linear_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Attention first; a window of one token; as many value as key heads, wider than these; half of a head rotates.
    "q35-dense": (
        "q35-dense",
        {
            "layer_types": (FULL, GDN),
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 24,
            "head_dim": 24,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
    ),
    # Irregular layers; keys wider than values; whole heads rotate; tied, as no MoE release is; one KV head per head.
    "q35-moe": (
        "q35-moe",
        {
            "layer_types": (GDN, FULL, GDN),
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 8,
            "partial_rotary_factor": 1.0,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    # Dense and MoE layers by both keys; three value heads per key head; router weights as they are; one KV head.
    "next-mixed": (
        "next-moe",
        {
            "layer_types": (GDN, GDN, FULL),
            "mlp_only_layers": (2,),
            "decoder_sparse_step": 2,
            "linear_num_value_heads": 6,
            "norm_topk_prob": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_shards": 3,
        },
    ),
    # No attention at all, so no KV pages but the MTP head's; eight value heads for the only key head.
    "next-gdn-only": (
        "next-dense",
        {
            "layer_types": (GDN, GDN),
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 8,
            "linear_conv_kernel_dim": 3,
        },
    ),
    # Attention alone, so no states, rotated by YaRN; a text-only export; no MTP head.
    "q35-attention-only": (
        "q35-dense-flat",
        {
            "layer_types": (FULL, FULL),
            "rope_scaling": YARN,
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "mtp": False,
        },
    ),
    # YaRN where Next spells it; four value heads per key head; one expert per token; no MTP tensors in the files.
    "next-yarn": (
        "next-moe",
        {
            "layer_types": (GDN, FULL),
            "rope_scaling": YARN,
            "rope_theta": 5e5,
            "linear_num_value_heads": 8,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "mtp": False,
        },
    ),
    "q35-moe-fp8": ("q35-moe-fp8", {}),
}
VOCABULARY = 131
# The same as for recorded values: logits have a deviation of about 5. Seen: 3e-5.
LOGITS = {"rtol": 0, "atol": 2e-3}
PROMPT = 70  # tokens: one chunk and a short one
ACCEPTED = (3, 1, 2)  # of three tokens run in each verify step; the rest is rejected
IDS = np.random.RandomState(2).randint(0, VOCABULARY, PROMPT + sum(ACCEPTED))
PAGES = (3, 1)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> tuple[Steps, OracleModel]:
    """A checkpoint as the package and as the oracle read it."""
    family, sizes = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, family, seed=5, **{"vocab_size": VOCABULARY, "text": False, **sizes})
    return Steps(load_model(folder, dtype="float32")), OracleModel(folder)


def test_prompt_and_verify_steps_give_the_float64_logits(pair):
    steps, oracle = pair
    wanted = oracle.logits(IDS)
    assert oracle.smallest_router_gap > 1e-5, "float32 may choose other experts here: take another seed"
    (output,), state = steps.prefill(steps.pools(), Span(tokens=IDS[:PROMPT], pages=PAGES, write=1))
    np.testing.assert_allclose(output.logits, wanted[:PROMPT], **LOGITS)
    folded, num_replay = PROMPT, 0
    for count in ACCEPTED:
        position = folded + num_replay
        tokens = [*IDS[position : position + count], *(7,) * (3 - count)]
        window = Window(tokens=tokens, pages=PAGES, lane=1, read=1, write=1, folded=folded, num_replay=num_replay)
        (output,), state = steps.advance(state, window)
        np.testing.assert_allclose(output.logits[:count], wanted[position : position + count], **LOGITS)
        folded, num_replay = position, count


def test_mtp_head_gives_the_float64_logits_or_is_absent(pair):
    steps, oracle = pair
    assert (steps.model.mtp is not None) == oracle.has_mtp
    if not oracle.has_mtp:
        return
    hidden = oracle.hidden(IDS[: PROMPT - 1])
    _, wanted = oracle.mtp(hidden, IDS[1:PROMPT])
    span = Span(tokens=IDS[1:PROMPT], pages=PAGES, start=1)
    (output,), _ = steps.mtp_prefill(steps.pools(), span, hidden=[hidden])
    np.testing.assert_allclose(output.logits, wanted, **LOGITS)
