"""The shipped model: its weights are whole, its answers those on record, and the demo shows what it promises.

`python -m pytest tests/serving/test_pico.py` compares with `pico.json`, which
`PYTHONPATH=.:tests python tests/serving/test_pico.py` writes.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors import safe_open

from gdn_jax import LLM, RequestOutput, SamplingParams
from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import abstract_model
from gdn_jax.shipped import model_folder
from gdn_jax.weights import load_weights

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("pico.json")
MOST_BYTES = 20 * 10**6
FOLDER = Path(model_folder("pico"))


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_demo()


def start(num_drafts: int) -> LLM:
    settings = demo.SETTINGS | {"speculative_tokens": num_drafts, "dtype": "float32", "use_tqdm": False}
    return LLM("pico", **settings)


def answers(llm: LLM) -> dict[str, list[int]]:
    """Answer two texts and a conversation, greedily."""
    found = {}
    for prompt, _ in demo.TEXTS:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
        found[prompt] = list(output.outputs[0].token_ids)
    messages = [{"role": "system", "content": demo.SYSTEM}]
    for question in demo.TURNS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        found[question] = list(output.outputs[0].token_ids)
    return found


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return start(3)


def test_every_parameter_is_in_the_file_the_draft_head_included() -> None:
    config = ModelConfig.from_folder(str(FOLDER))
    assert config.num_mtp_layers == 1
    model = load_weights(
        abstract_model(config, dtype=jnp.dtype("bfloat16"), implementation=Implementation.JAX), config, str(FOLDER)
    )
    leaves = nnx.to_flat_state(nnx.state(model))
    assert all(jnp.isfinite(leaf[...]).all() and bool((leaf[...] != 0).any()) for _, leaf in leaves)


def test_the_file_holds_bfloat16_but_for_what_is_summed_up_in_float32() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    wide = {name for name, dtype in dtypes.items() if dtype == "F32"}
    assert set(dtypes.values()) == {"BF16", "F32"}
    assert {name for name in dtypes if name.endswith(".A_log")} <= wide
    kinds = ("A_log", "dt_bias", "norm.weight")
    assert {name.partition(".linear_attn.")[2] for name in wide} == set(kinds)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


def test_answers_with_drafts_are_those_on_record(drafting: LLM) -> None:
    assert answers(drafting) == json.loads(RECORD.read_text())
    assert drafting.stats().tokens_per_verify > 2


def test_answers_without_drafts_are_those_on_record() -> None:
    assert answers(start(0)) == json.loads(RECORD.read_text())


def test_the_demo_streams_hits_the_cache_and_gets_its_sum_right(
    drafting: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    drafting.reset_prefix_cache()
    cached: list[int] = []
    talk = demo.talk
    monkeypatch.setattr(demo, "start", lambda model: drafting)
    monkeypatch.setattr(demo, "talk", lambda llm: cached.extend(talk(llm)))
    demo.main("pico")
    shown = capsys.readouterr().out
    assert cached == [0, 64, 64, 128]
    assert all(text in shown for text in ("My name is Ada.", "Anna is 34 years old.", "374 + 858 = 1232", "per step"))


def test_a_stream_of_the_demo_comes_in_parts(drafting: LLM) -> None:
    parts: list[RequestOutput] = list(drafting.stream(demo.TEXTS[0][0], demo.greedy(12)))
    assert len(parts) > 2
    assert sum(len(part.outputs[0].token_ids) for part in parts) == 12


if __name__ == "__main__":
    RECORD.write_text(json.dumps(answers(start(0)), indent=1) + "\n")
