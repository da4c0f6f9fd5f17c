"""The gated attention layer against a NumPy float64 layer that sees whole sequences and knows no pages."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gdn_jax.attention import GatedAttention
from gdn_jax.config import ModelConfig
from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.state import AdvanceBatch, KVPages, PrefillBatch

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3_next",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-3,
    }
)
# Float32 angles up to 140 are off by 1e-5, sums of up to 140 terms by less.
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = (135, 70)  # two sequences; 3 and 2 pages
TABLES = np.array([[5, 2, 6], [1, 4, 0]], np.int32)
MTP = {"rope_offset": -1, "first_key": 1}  # how the MTP layer calls: entries from position 1 on


def make_layer(implementation=Implementation.JAX, dtype="float32"):
    """Return a layer with random weights, made in NumPy: compiling every initialiser would take seconds."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape, scale=leaf.shape[-1] ** -0.5), leaf.dtype)

    def make():
        return GatedAttention(CONFIG, dtype=jnp.dtype(dtype), implementation=implementation, rngs=nnx.Rngs(0))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, jax.tree.map(fill, abstract))


@cache
def compiled(implementation, *, mtp):
    """Return a layer and its two ways through, compiled."""
    layer, attention = make_layer(implementation), MTP if mtp else {}
    return layer, jax.jit(partial(layer.prefill, **attention)), jax.jit(partial(layer.advance, **attention))


def whole_sequence(layer, x, *, rope_offset=0, first_key=0):
    """Return outputs, keys and values of one sequence x [n, H], in float64; zero output where no key is visible."""
    weight = {
        name: np.asarray(getattr(layer, name).weight[...], np.float64)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }

    def norm(heads, gain):
        return heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + 1e-3) * (1.0 + gain)

    def turn(heads):  # 8 of 16 channels, as complex numbers
        angle = np.outer(np.arange(len(x)) + rope_offset, 500.0 ** (-np.arange(4) / 4))
        pairs = (heads[..., :4] + 1j * heads[..., 4:8]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag, heads[..., 8:]], axis=-1)

    x = np.asarray(x, np.float64)
    q_and_gate = (x @ weight["q_proj"].T).reshape(-1, 4, 32)
    q, gate = turn(norm(q_and_gate[..., :16], weight["q_norm"])), q_and_gate[..., 16:]
    k = turn(norm((x @ weight["k_proj"].T).reshape(-1, 2, 16), weight["k_norm"]))
    v = (x @ weight["v_proj"].T).reshape(-1, 2, 16)
    out = np.zeros(q.shape)
    for t in range(first_key, len(x)):
        for head in range(4):
            score = k[first_key : t + 1, head // 2] @ q[t, head] / 4.0
            share = np.exp(score - score.max())
            out[t, head] = share @ v[first_key : t + 1, head // 2] / share.sum()
    return (out / (1.0 + np.exp(-gate))).reshape(len(x), -1) @ weight["o_proj"].T, k, v


def inputs(lengths=LENGTHS):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(length, 24)).astype(np.float32) for length in lengths]


def empty_pages(dtype=np.float32):
    """Return NaN in every page: what is read must have been written."""
    return KVPages(**{side: jnp.full((8, CHUNK, 2, 16), np.nan, dtype) for side in "kv"})


def prefill_batch(starts, lengths, num_tokens):
    offset = np.cumsum([0, *lengths[:-1]]) + 2  # two tokens in front belong to no row
    offset, length, start = (jnp.asarray(np.asarray(array, np.int32)) for array in (offset, lengths, starts))
    null = jnp.zeros((len(starts),), jnp.int32)
    anchors = {"read_slot": null, "write_slot": null, "export_slot": null[:, None]}
    rows = PrefillRows(offset=offset, length=length, start=start, **anchors)
    return PrefillBatch(
        token_ids=jnp.zeros((num_tokens,), jnp.int32), rows=rows, block_tables=jnp.asarray(TABLES[: len(starts)])
    )


def advance_batch(starts, num_new, window):
    start, new = (jnp.asarray(np.asarray(array, np.int32)) for array in (starts, num_new))
    null = jnp.zeros((len(starts),), jnp.int32)
    anchors = {"read_slot": null, "write_slot": null, "save_slot": null, "save_at": null}
    rows = AdvanceRows(folded=start, num_replay=null, num_new=new, **anchors)
    token_ids = jnp.zeros((len(starts), window), jnp.int32)
    return AdvanceBatch(token_ids=token_ids, rows=rows, lane=null, block_tables=jnp.asarray(TABLES))


def run_prefill(prefill, x, spans):
    """Prefill span (start, stop) of each sequence in one call of 160 packed tokens; return outputs per span."""
    packed = np.full((160, 24), 7.0, np.float32)
    starts, lengths = [a for a, _ in spans], [b - a for a, b in spans]
    batch = prefill_batch(starts, lengths, 160)
    offset = np.asarray(batch.rows.offset)
    for at, sequence, (a, b) in zip(offset, x, spans, strict=True):
        packed[at : at + b - a] = sequence[a:b]
    out, pages = prefill(jnp.asarray(packed), empty_pages(), batch)
    out = np.asarray(out)
    assert not np.any(out[:2])
    return [out[at : at + b - a] for at, (a, b) in zip(offset, spans, strict=True)], pages


@pytest.mark.parametrize(
    ("implementation", "mtp"),
    [(Implementation.JAX, False), (Implementation.JAX, True), (Implementation.REFERENCE, True)],
)
def test_prefill_and_advance_continue_each_other_as_one_sequence(implementation, mtp):
    layer, prefill, advance = compiled(implementation, mtp=mtp)
    x = inputs()
    expected = [whole_sequence(layer, sequence, **(MTP if mtp else {}))[0] for sequence in x]
    spans = [(int(mtp), 90), (int(mtp), 66)]  # no entry of the MTP layer stands at position 0
    got, pages = run_prefill(prefill, x, spans)
    for values, wanted, (a, b) in zip(got, expected, spans, strict=True):
        np.testing.assert_allclose(values, wanted[a:b], **FLOAT32)
    for starts, new in (([90, 66], [3, 1]), ([91, 67], [3, 2])):  # one of two drafts rejected, then overwritten
        window = np.full((2, 3, 24), 7.0, np.float32)
        for row, (start, count) in enumerate(zip(starts, new, strict=True)):
            window[row, :count] = x[row][start : start + count]
        out, pages = advance(jnp.asarray(window), pages, advance_batch(starts, new, 3))
        out = np.asarray(out)
        for row, (start, count) in enumerate(zip(starts, new, strict=True)):
            np.testing.assert_allclose(out[row, :count], expected[row][start : start + count], **FLOAT32)
            assert not np.any(out[row, count:])


def test_pages_hold_normed_rotated_keys_and_raw_values_at_the_block_tables_slots():
    layer, prefill, advance = compiled(Implementation.JAX, mtp=True)
    x = inputs()
    _, pages = run_prefill(prefill, x, [(1, 90), (1, 66)])
    window = jnp.asarray(np.stack([x[0][90:93], x[1][66:69]]))
    _, pages = advance(window, pages, advance_batch([90, 66], [3, 1], 3))
    keys, values = np.asarray(pages.k), np.asarray(pages.v)
    written = np.zeros((8, CHUNK), bool)
    for table, sequence, length in zip(TABLES, x, (93, 67), strict=True):
        _, k, v = whole_sequence(layer, sequence, **MTP)
        for position in range(1, length):
            at = (table[position // CHUNK], position % CHUNK)
            written[at] = True
            np.testing.assert_allclose(keys[at], k[position], **FLOAT32)
            np.testing.assert_allclose(values[at], v[position], **FLOAT32)
    assert np.all(np.isnan(keys[~written]))
    assert np.all(np.isnan(values[~written]))


def test_bfloat16_stays_near_the_exact_layer():
    layer, x = make_layer(dtype="bfloat16"), [sequence.astype(jnp.bfloat16) for sequence in inputs((80, 70))]
    packed = np.zeros((160, 24), jnp.bfloat16)
    packed[2:82], packed[82:152] = x
    batch = prefill_batch([0, 0], [80, 70], 160)
    out, pages = jax.jit(layer.prefill)(jnp.asarray(packed), empty_pages(jnp.bfloat16), batch)
    assert out.dtype == pages.k.dtype == jnp.bfloat16
    out = np.asarray(out, np.float64)
    for got, sequence in ((out[2:82], x[0]), (out[82:152], x[1])):
        expected, _, _ = whole_sequence(layer, sequence)
        # Rounded at 2^-9 relative after each of five products: a few per cent of the output's deviation at worst.
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.05 * expected.std())


def test_every_parameter_gets_a_gradient_through_the_pages():
    layer, x = make_layer(), jnp.asarray(np.concatenate(inputs((90, 70))))
    aim = np.random.default_rng(3).normal(size=(160, 24)).astype(np.float32)
    batch = prefill_batch([0, 0], [90, 66], 160)
    graph, params = nnx.split(layer)

    def loss(params):
        out, _ = nnx.merge(graph, params).prefill(x, empty_pages(), batch)
        return (out * aim).sum()

    for path, gradient in nnx.to_flat_state(jax.jit(jax.grad(loss))(params)):
        values = np.asarray(gradient[...])
        assert np.all(np.isfinite(values)), path
        assert np.any(values), path
