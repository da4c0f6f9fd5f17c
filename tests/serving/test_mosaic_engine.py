"""An engine on Mosaic kernels answers as one on plain JAX: interpreted on a CPU, compiled on a Hopper GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mosaic_runs import ON_GPU, run_mosaic, tell_kernels
from oracles.engine_rig import cached, greedy, random_ids, tokens_of

from gdn_jax import LLM
from gdn_jax.kernels.dispatch import Implementation, KernelChoice
from gdn_jax.serving import startup

# Two layers with the least widths that Mosaic kernels run, and an MTP head.
SIZES = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 256,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def two_turns(folder: Path, kernels: str, drafts: int, dtype: str = "float32") -> tuple[list[list[int]], list[int]]:
    """Answer a prompt across a boundary, then one that goes on from it; returns the tokens and the hits."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        kernels=kernels,
        speculative_tokens=drafts,
        dtype=dtype,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=128,
        use_tqdm=False,
    )
    prompt = random_ids(0, 62)
    first = llm.generate([prompt], greedy(3), use_tqdm=False)
    more = llm.generate([prompt + tokens_of(first)[0] + [7]], greedy(2), use_tqdm=False)
    return tokens_of([*first, *more]), cached([*first, *more])


# In float32 GDN layers are Mosaic kernels in decode alone; in 16 bits they are in prefill, too, and so is attention.
@pytest.mark.parametrize(("drafts", "dtype"), [(0, "float16"), (2, "float32")])
def test_mosaic_kernels_give_the_tokens_and_hits_of_plain_jax(
    drafts: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))

    # On a CPU the engine refuses Mosaic kernels; here they are interpreted.
    def choose(name: str, check: Callable[[], None]) -> KernelChoice:
        check()
        return KernelChoice(implementation=Implementation(name), reason="a test")

    monkeypatch.setattr(startup, "choose_kernels", choose)
    tell_kernels(monkeypatch)
    tokens, hits = two_turns(tmp_path, "jax", drafts, dtype)
    assert hits == [0, 64]
    assert run_mosaic(lambda: two_turns(tmp_path, "mosaic", drafts, dtype)) == (tokens, hits)


@pytest.mark.gpu
def test_16_bit_attention_runs_in_the_engine_and_two_runs_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert ON_GPU
    first, again = (two_turns(tmp_path, "mosaic", 2, "bfloat16") for _ in range(2))
    assert first == again
    assert first[1] == two_turns(tmp_path, "jax", 2, "bfloat16")[1]
