"""The oracle against values of the published implementation, and the checkpoint writer against the oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden import make_golden
from oracles.checkpoint_sizes import FAMILIES
from oracles.checkpoint_text import num_tokens
from oracles.checkpoints import write_checkpoint
from oracles.numpy_layers import delta_rule, l2_normalize
from oracles.numpy_model import OracleModel
from oracles.numpy_weights import dequantize, read_safetensors, yarn_frequencies
from safetensors.numpy import load_file
from tokenizers import Tokenizer

GOLDEN = Path(make_golden.__file__).parent
REFERENCES = ("tiny-next-moe", "tiny-next-dense", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8")
# The reference values were computed in float32, which is about 1e-4 from float64 on logits of size 20.
LOGIT_TOLERANCE = 2e-4
STATE_TOLERANCE = 2e-5


@pytest.mark.parametrize("name", REFERENCES)
def test_oracle_agrees_with_the_reference_values(golden_folder: Path, name: str) -> None:
    model, want = OracleModel(golden_folder / name), load_file(golden_folder / name / "golden.safetensors")
    trace: dict[str, np.ndarray] = {}
    hidden, cache = model.advance(want["len65.ids"], model.empty_cache(), trace=trace)
    np.testing.assert_allclose(hidden @ model.head.T, want["len65.logits"], rtol=0, atol=LOGIT_TOLERANCE)
    for key in (key for key in want if key.startswith("trace.")):
        np.testing.assert_allclose(trace[key.removeprefix("trace.")], want[key], rtol=0, atol=STATE_TOLERANCE)
    for i, (kind, (first, second)) in enumerate(zip(model.sizes.layer_types, cache, strict=True)):
        names = ("recurrent", "conv") if kind == "linear_attention" else ("k", "v")
        expected = [want[f"state65.layer{i}.{part}"] for part in names]
        if kind == "linear_attention":
            expected[1] = expected[1][:, 1:]  # the reference keeps one column that is never read again
        np.testing.assert_allclose(first, expected[0], rtol=0, atol=STATE_TOLERANCE)
        np.testing.assert_allclose(second, expected[1], rtol=0, atol=STATE_TOLERANCE)
    mtp_hidden, mtp_logits = model.mtp(want["mtp.target_hidden"], want["mtp.next_ids"])
    np.testing.assert_allclose(mtp_hidden, want["mtp.hidden"], rtol=0, atol=STATE_TOLERANCE)
    np.testing.assert_allclose(mtp_logits, want["mtp.logits"], rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", REFERENCES)
def test_oracle_decodes_as_the_reference_does(golden_folder: Path, name: str) -> None:
    model, want = OracleModel(golden_folder / name), load_file(golden_folder / name / "golden.safetensors")
    tokens, drafts, accepted = model.spec(want["greedy17.prompt"], 32, 3)
    assert tokens == model.greedy(want["greedy17.prompt"], 32) == want["greedy17.tokens"].tolist()
    assert drafts == want["spec17.k3.drafts"].tolist()
    assert accepted == want["spec17.k3.accepted"].tolist()


def test_oracle_pieces_agree_with_the_kernel_values(golden_folder: Path) -> None:
    want = read_safetensors(golden_folder / "kernels.safetensors")
    frequencies = yarn_frequencies(1e7, 64, 4.0, 262144)
    np.testing.assert_allclose(frequencies, want["rope.yarn_inv_freq"], rtol=1e-12)
    weight = dequantize(want["fp8.weight"], want["fp8.weight_scale_inv"], (128, 128))
    np.testing.assert_array_equal(weight, want["fp8.dequant"])  # bf16 times e4m3 is exact in float32
    q, k, v, g, beta = (
        want[f"gdr.same_key_beta09.{part}"][0].astype(np.float64) for part in ("q", "k", "v", "g", "beta")
    )
    q, k = (np.repeat(l2_normalize(x), v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    start = want.get("gdr.same_key_beta09.h0", np.zeros((1, v.shape[1], k.shape[2], v.shape[2])))[0].astype(np.float64)
    out, state = delta_rule(q / np.sqrt(q.shape[2]), k, v, g, beta, start)
    np.testing.assert_allclose(out, want["gdr.same_key_beta09.o"][0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state, want["gdr.same_key_beta09.hT"][0], rtol=1e-9, atol=1e-12)


def test_a_split_span_gives_the_states_of_the_whole_one(tmp_path: Path) -> None:
    model = OracleModel(write_checkpoint(tmp_path, "q35-moe", seed=1))
    ids = np.arange(20)
    whole, whole_cache = model.advance(ids, model.empty_cache())
    cache, parts = model.empty_cache(), []
    for span in (ids[:1], ids[1:3], ids[3:17], ids[17:]):
        part, cache = model.advance(span, cache)
        parts.append(part)
    # Only the order of additions differs.
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-9, atol=1e-11)
    for memory, whole_memory in zip(cache, whole_cache, strict=True):
        for array, whole_array in zip(memory, whole_memory, strict=True):
            np.testing.assert_allclose(array, whole_array, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", [family + suffix for family in FAMILIES for suffix in ("", "-fp8")])
def test_every_family_is_written_as_a_lively_model(tmp_path: Path, family: str) -> None:
    model = OracleModel(write_checkpoint(tmp_path, family, seed=2))
    logits = model.logits(np.arange(0, 240, 10))
    assert model.has_mtp
    assert 3.0 < logits[:, : num_tokens(320)].std() < 6.0
    assert np.abs(logits[:, num_tokens(320) :]).max() < 1.0  # padding is never chosen
    assert ("gate.weight" in model.under("layers.0.mlp.")) == ("moe" in family)


def test_one_seed_is_one_model_in_every_layout(tmp_path: Path) -> None:
    ids = np.arange(40, 60)

    def logits(name: str, family: str, **sizes: object) -> np.ndarray:
        return OracleModel(write_checkpoint(tmp_path / name, family, seed=3, **sizes)).logits(ids)

    moe = logits("fused", "q35-moe")
    for name, family, sizes in (
        ("experts", "q35-moe", {"fused_experts": False}),
        ("flat", "q35-moe-flat", {}),
        ("next", "next-moe", {}),
        ("shards", "q35-moe", {"num_shards": 3, "mtp_in_own_file": True}),
        ("draftless", "q35-moe", {"mtp": False, "vision": False, "text": False}),
    ):
        got = logits(name, family, **sizes)
        # Without a tokenizer no row is padding.
        np.testing.assert_array_equal(got[:, : num_tokens(320)], moe[:, : num_tokens(320)], err_msg=name)
    rounded = logits("fp8", "q35-moe", fp8=True, fused_experts=False)
    assert 0.01 < np.abs(rounded - moe).mean() < 1.0  # three bits of mantissa, about 3 % per weight


def test_sizes_change_what_is_written(tmp_path: Path) -> None:
    kinds = ("full_attention", "linear_attention", "full_attention")
    folder = write_checkpoint(
        tmp_path,
        "q35-dense",
        seed=4,
        layer_types=kinds,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_conv_kernel_dim=2,
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
        dtype="float32",
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    )
    model = OracleModel(folder)
    assert model.sizes.layer_types == kinds
    assert model.states([1, 2])[1]["conv"].shape == (2 * 3 * 16 + 6 * 16, 1)
    assert model.sizes.inverse_frequencies.size == 8
    assert model.sizes.rotary_scale == pytest.approx(1.13862944)
    assert not np.array_equal(model.head, model.weights["embed_tokens.weight"])
    assert read_safetensors(folder / "model.safetensors")["lm_head.weight"].dtype == np.float32


def test_unknown_families_and_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family must be one of"):
        write_checkpoint(tmp_path, "q36-dense", seed=0)
    with pytest.raises(ValueError, match="one tensor per expert"):
        write_checkpoint(tmp_path, "next-moe", seed=0, fused_experts=True)
    with pytest.raises(ValueError, match="vocab_size must be at least"):
        write_checkpoint(tmp_path, "q35-dense", seed=0, vocab_size=64)
    with pytest.raises(ValueError, match="multiple of linear_num_key_heads"):
        write_checkpoint(tmp_path, "q35-dense", seed=0, linear_num_key_heads=3)


def test_the_written_tokenizer_keeps_tags_and_drops_specials(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_checkpoint(tmp_path, "q35-dense", seed=0) / "tokenizer.json"))
    text = "<|im_start|>user\nhello the world, न café 123<|im_end|>\n<think>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert (
        tokenizer.token_to_id("<|im_end|>")
        in json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    )
    assert tokenizer.get_vocab_size() == num_tokens(320)


@pytest.mark.parametrize("name", make_golden.MODELS)
def test_golden_checkpoints_are_made_again_byte_for_byte(tmp_path: Path, name: str) -> None:
    made = make_golden.write_model(name, tmp_path)
    names = {path.name for path in made.iterdir()}
    assert names | {"golden.json", "golden.safetensors"} == {path.name for path in (GOLDEN / name).iterdir()}
    for file in sorted(names):
        assert (made / file).read_bytes() == (GOLDEN / name / file).read_bytes(), f"{file} differs: run make_golden.py"


def test_golden_values_are_those_of_the_oracle() -> None:
    arrays, facts = make_golden.expected_values(GOLDEN / "tiny-hybrid")
    committed = load_file(GOLDEN / "tiny-hybrid" / "golden.safetensors")
    assert arrays.keys() == committed.keys()
    for name, array in arrays.items():
        # One float32 rounding: sums may be taken in another order on another machine.
        np.testing.assert_allclose(array, committed[name], rtol=2e-7, atol=1e-9, err_msg=name)
    make_golden.check_gaps(facts)


@pytest.mark.parametrize("name", make_golden.MODELS)
def test_golden_gaps_are_wide_enough_for_float32(name: str) -> None:
    make_golden.check_gaps(json.loads((GOLDEN / name / "golden.json").read_text()))
