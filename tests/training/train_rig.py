"""A run small enough for a test: a model of two layers, two domains of made-up text, and a config of both."""

import json
import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from oracles.engine_rig import TINY

from gdn_jax.training.config import BatchConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gdn_jax.training.loss import LossOptions

MODEL = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
WORDS = ["the", "river", "ran", "past", "a", "mill", "and", "its", "boat", "lay", "where", "water", "was", "slow"]


def write_texts(path: Path, texts: Iterable[str]) -> None:
    """Write one text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def write_text_folder(folder: Path) -> Path:
    """Write two domains, one of them in two files."""
    rng = np.random.default_rng(0)

    def sentences(count: int) -> list[str]:
        return [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(count)]

    for part, count in (("train", 40), ("held_out", 8)):
        write_texts(folder / part / "prose-1.jsonl.xz", sentences(count))
        write_texts(folder / part / "prose-2.jsonl.xz", sentences(count))
        write_texts(folder / part / "arithmetic.jsonl.xz", [f"{n} + {n} = {2 * n}" for n in range(count)])
    return folder


def make_config(text: Path, out: Path, *, total_steps: int = 30, **run: object) -> TrainConfig:
    """Return the settings of a run of rows of 64 tokens in float32."""
    return TrainConfig(
        model=MODEL,
        tokenizer=str(TINY),
        data=DataConfig(
            folders=(str(text),), weights={"prose": 3.0, "arithmetic": 1.0}, sequence_length=64, held_out_tokens=256
        ),
        optimizer=OptimizerConfig(peak_learning_rate=2e-2, warmup_steps=2, total_steps=total_steps),
        batch=BatchConfig(rows=4, micro_batches=2),
        loss=LossOptions(mtp_depth=1),
        run=RunConfig(**{"out": str(out), "compute_dtype": "float32", "evaluate_every": 15, **run}),
    )
