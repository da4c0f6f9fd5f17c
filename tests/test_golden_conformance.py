"""The whole project against recorded values, through the adapter that the conformance script takes.

The reference folders, made with the published implementation, lie beside the checkout with the script that compares;
those tests skip where they are absent. The project's own folders under tests/golden are always compared.
"""

import importlib.util
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import golden_adapter
import jax
import numpy as np
import pytest
from flax import nnx
from golden_adapter import Adapter
from safetensors.numpy import load_file

from gdn_jax.state import KVPages

MODELS = ("tiny-next-dense", "tiny-next-moe", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8")
TRACED = ("tiny-next-dense", "tiny-q35-moe")  # sharded float32 with attention every 2nd layer; odd sizes and experts
OWN = Path(__file__).resolve().parent / "golden"
OWN_MODELS = ("tiny-hybrid", "tiny-next-moe")
# Float32 against float32 (reference) or float64 (own), whose logits have deviations of 3 to 7; a good run is 10 times
# nearer. These are the tolerances that come with the data.
LOGITS = {"rtol": 0, "atol": 2e-3}
HIDDEN = {"rtol": 1e-3, "atol": 5e-4}


@pytest.fixture(scope="session")
def script(golden_folder: Path) -> ModuleType:
    """The conformance script, as a module."""
    spec = importlib.util.spec_from_file_location("check_golden", golden_folder.parent / "tools" / "check_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def adapter(folder: Path) -> Adapter:
    return Adapter(str(folder))


def assert_conforms(report: Any, told: str) -> None:
    """Fail unless the script would end with "0 failed, 0 skipped" and compared many values; show what it printed."""
    assert report.n["failed"] == report.n["skipped"] == 0, told
    assert report.n["passed"] > 40, "the script compared nearly nothing"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder_conforms(script, golden_folder, capsys, name):
    report = script.Report()
    script.model(report, lambda folder: adapter(Path(folder)), golden_folder / name)
    assert_conforms(report, capsys.readouterr().out)


def test_the_kernel_cases_conform(script, golden_folder, capsys):
    report = script.Report()
    script.kernels(report, Adapter, golden_folder / "kernels.safetensors")
    assert_conforms(report, capsys.readouterr().out)


def test_every_reference_folder_is_compared(golden_folder):
    assert {path.name for path in golden_folder.iterdir() if path.is_dir()} == set(MODELS)


@pytest.fixture(scope="module", params=TRACED)
def reference(request, golden_folder) -> tuple[Adapter, dict[str, np.ndarray]]:
    folder = golden_folder / request.param
    return adapter(folder), load_file(folder / "golden.safetensors")


@partial(jax.jit, static_argnums=0)
def trace(graph: nnx.GraphDef, params: nnx.State, batch: Any, state: Any) -> Any:
    """Return what stands inside a prefill, by the names of the recorded values, and the state of each layer."""
    decoder = nnx.merge(graph, params).decoder
    x, states = decoder.embed_tokens(batch.token_ids), []
    inside = {"embed": x}
    for index, (layer, before) in enumerate(zip(decoder.layers, state.layers, strict=True)):
        mixed, _ = layer.mixer.prefill(layer.input_layernorm(x), before, batch)
        fed = layer.mlp(layer.post_attention_layernorm(x + mixed))
        x, after = layer.prefill(x, before, batch)
        inside |= {f"layer{index}.mixer": mixed, f"layer{index}.mlp": fed, f"layer{index}.out": x}
        states.append(after)
    return {**inside, "final_norm": decoder.norm(x)}, states


def test_the_inside_of_a_prompt_is_as_recorded(reference):
    model, want = reference
    batch = golden_adapter._spans([0], [65], want["len65.ids"])
    inside, states = trace(model.graph, model.params, batch, model.state())
    recorded = {name.removeprefix("trace.") for name in want if name.startswith("trace.")}
    assert recorded == inside.keys()
    for name, array in inside.items():
        np.testing.assert_allclose(array[:65], want[f"trace.{name}"], **HIDDEN, err_msg=name)
    table, num_caches = np.asarray(batch.block_tables[0]), 0
    for index, state in enumerate(states):
        if isinstance(state, KVPages):
            for side in ("k", "v"):
                pages = np.asarray(getattr(state, side))[table]  # [blocks, block, Hkv, D]
                cached = pages.reshape(-1, *pages.shape[2:])[:65].swapaxes(0, 1)
                np.testing.assert_allclose(cached, want[f"state65.layer{index}.{side}"], **HIDDEN)
                num_caches += 1
    assert num_caches == sum(name.endswith((".k", ".v")) for name in want if name.startswith("state65."))


@pytest.mark.parametrize("length", [3, 65])
def test_states_after_a_prompt_are_as_recorded(reference, length):
    model, want = reference
    states = model.states(want[f"len{length}.ids"])
    assert states
    for index, parts in states.items():
        recurrent, conv = (want[f"state{length}.layer{index}.{part}"] for part in ("recurrent", "conv"))
        np.testing.assert_allclose(parts["recurrent"], recurrent, **HIDDEN)
        np.testing.assert_allclose(parts["conv"], conv[:, 1:], **HIDDEN)  # the oldest column is never read again


@pytest.mark.parametrize("length", [1, 17, 70])
def test_cached_decode_has_the_recorded_logits(reference, length):
    model, want = reference
    sequence = golden_adapter._Sequence(model, want[f"greedy{length}.prompt"])
    logits = [sequence.logits[-1]]
    for token in want[f"greedy{length}.tokens"][:-1]:
        logits.append(sequence.verify([int(token)])[0])
        sequence.accept(1)
    np.testing.assert_allclose(np.stack(logits), want[f"greedy{length}.logits"], **LOGITS)


def test_drafts_that_feed_each_other_have_the_recorded_logits(reference):
    model, want = reference
    m, logits, pages = model._mtp(want["mtp.target_hidden"], want["mtp.next_ids"])
    chain, last = [logits[-1]], m[-1]
    for count, token in enumerate(want["mtp.chain_tokens"][:-1].tolist()):
        batch = golden_adapter._window([token], folded=66 + count, num_replay=0)
        fed = np.zeros((1, batch.token_ids.shape[1], last.shape[0]), np.float32)
        fed[0, 0] = last
        out, out_logits, pages = golden_adapter._mtp_advance(model.graph, model.params, batch, fed, pages)
        chain, last = [*chain, np.asarray(out_logits)[0, 0]], np.asarray(out)[0, 0]
    np.testing.assert_array_equal(np.argmax(chain, axis=-1), want["mtp.chain_tokens"])
    np.testing.assert_allclose(np.stack(chain), want["mtp.chain_logits"], **LOGITS)


@pytest.fixture(scope="module", params=OWN_MODELS)
def own(request) -> tuple[Adapter, dict[str, np.ndarray]]:
    return adapter(OWN / request.param), load_file(OWN / request.param / "golden.safetensors")


def test_own_logits_are_as_recorded_alone_and_packed(own):
    model, want = own
    for length in (1, 3, 64, 65, 130):
        np.testing.assert_allclose(model.logits(want["ids"][:length]), want["logits"][:length], **LOGITS)
    lengths = (3, 65, 130)
    packed = model.packed(np.concatenate([want["ids"][:n] for n in lengths]), np.cumsum([0, *lengths]))
    np.testing.assert_allclose(packed, np.concatenate([want["logits"][:n] for n in lengths]), **LOGITS)


@pytest.mark.parametrize("length", [1, 65, 130])
def test_own_states_are_as_recorded(own, length):
    model, want = own
    states = model.states(want["ids"][:length])
    assert {f"state{length}.layer{index}.conv" for index in states} == {
        name for name in want if name.startswith(f"state{length}.") and name.endswith(".conv")
    }
    for index, parts in states.items():
        for part, array in parts.items():
            np.testing.assert_allclose(array, want[f"state{length}.layer{index}.{part}"], **HIDDEN)


def test_own_mtp_head_is_as_recorded(own):
    model, want = own
    hidden, logits = model.mtp(want["mtp.target_hidden"], want["mtp.next_ids"])
    np.testing.assert_allclose(hidden, want["mtp.hidden"], **HIDDEN)
    np.testing.assert_allclose(logits[-8:], want["mtp.last_logits"], **LOGITS)


@pytest.mark.parametrize("length", [1, 17, 70])
def test_own_greedy_tokens_are_as_recorded(own, length):
    model, want = own
    np.testing.assert_array_equal(model.greedy(want[f"greedy{length}.prompt"], 32), want[f"greedy{length}.tokens"])


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("length", [17, 70])
def test_own_speculative_rounds_are_as_recorded(own, length, drafts):
    model, want = own
    tokens, guessed, accepted = model.spec(want[f"greedy{length}.prompt"], 32, drafts)
    np.testing.assert_array_equal(tokens, want[f"greedy{length}.tokens"])
    np.testing.assert_array_equal(guessed, want[f"spec{length}.k{drafts}.drafts"])
    np.testing.assert_array_equal(accepted, want[f"spec{length}.k{drafts}.accepted"])
