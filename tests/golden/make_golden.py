"""Make the committed golden checkpoints and their expected values.

    PYTHONPATH=tests python tests/golden/make_golden.py [NAME ...]

The checkpoint files come out byte for byte the same everywhere; the expected values, computed by the float64 oracle and
stored in float32, may differ in their last bit where another BLAS adds up in another order. A model whose smallest
gaps are too small for float32 to decide is refused: choose another seed.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
from oracles.checkpoints import write_checkpoint, write_safetensors
from oracles.numpy_model import OracleModel

HERE = Path(__file__).resolve().parent
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tiny-hybrid": (
        "q35-dense",
        36,
        {"hidden_size": 48, "intermediate_size": 64, "readable": True},
    ),
    "tiny-next-moe": (
        "next-moe",
        0,
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "full_attention_interval": 3,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}
PROMPT_TOKENS = 130  # prompts of 1, 3, 64, 65 tokens are its prefixes
STATE_TOKENS = (1, 65, 130)
MTP_TOKENS = 65
GREEDY_PROMPTS = (1, 17, 70)
GREEDY_TOKENS = 32
SPEC_PROMPTS = (17, 70)
SPEC_DRAFTS = (1, 3)
MIN_LOGIT_GAP = 0.02  # float32 logits are good to about 1e-4
MIN_ROUTER_GAP = 1e-4  # float32 router probabilities are good to about 1e-6


def write_model(name: str, folder: Path) -> Path:
    """Write the checkpoint files of a golden model, without expected values."""
    family, seed, sizes = MODELS[name]
    return write_checkpoint(folder, family, seed, **sizes)


def expected_values(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of golden.safetensors (see README.md) and the content of golden.json for a checkpoint."""
    model = OracleModel(folder)
    draws = np.random.RandomState(0)
    num_ids = len(model.head) - 10  # leave out rows that may be padding
    ids = draws.randint(0, num_ids, PROMPT_TOKENS)
    hidden = model.hidden(ids)
    logits = hidden @ model.head.T
    arrays = {"ids": ids, "logits": logits}
    for n in STATE_TOKENS:
        for layer, state in model.states(ids[:n]).items():
            arrays |= {f"state{n}.layer{layer}.{part}": array for part, array in state.items()}

    next_ids = np.append(ids[1:MTP_TOKENS], logits[MTP_TOKENS - 1].argmax())
    mtp_hidden, mtp_logits = model.mtp(hidden[:MTP_TOKENS], next_ids)
    arrays |= {"mtp.target_hidden": hidden[:MTP_TOKENS], "mtp.next_ids": next_ids}
    arrays |= {"mtp.hidden": mtp_hidden, "mtp.last_logits": mtp_logits[-8:]}

    greedy_gaps, draft_gaps, counts = {}, {}, {}
    for n in GREEDY_PROMPTS:
        prompt = draws.randint(0, num_ids, n)
        tokens, rows = model.greedy_logits(prompt, GREEDY_TOKENS)
        arrays |= {f"greedy{n}.prompt": prompt, f"greedy{n}.tokens": np.array(tokens)}
        greedy_gaps[n] = _smallest_gap(rows)
        for k in SPEC_DRAFTS if n in SPEC_PROMPTS else ():
            spec_tokens, drafts, accepted, draft_rows = model.spec_logits(prompt, GREEDY_TOKENS, k)
            if spec_tokens != tokens:
                raise RuntimeError(f"speculation with k = {k} changed the greedy output of a prompt of {n} tokens")
            arrays |= {f"spec{n}.k{k}.drafts": np.array(drafts), f"spec{n}.k{k}.accepted": np.array(accepted)}
            draft_gaps[f"{n}.k{k}"] = _smallest_gap(draft_rows)
            counts[f"{n}.k{k}"] = [sum(accepted), k * len(accepted)]
    facts = {
        "made_by": "tests/golden/make_golden.py",
        "logit_std": float(logits.std()),
        "smallest_greedy_gap": greedy_gaps,
        "smallest_draft_gap": draft_gaps,
        "smallest_router_gap": model.smallest_router_gap if np.isfinite(model.smallest_router_gap) else None,
        "accepted_of_drafted": counts,
    }
    return {name: _narrow(array) for name, array in arrays.items()}, facts


def _smallest_gap(rows: np.ndarray) -> float:
    """Return the smallest distance between the first and the second choice over rows of logits."""
    ordered = np.sort(rows, axis=-1)
    return float((ordered[:, -1] - ordered[:, -2]).min())


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32 if np.issubdtype(array.dtype, np.integer) else np.float32)


def check_gaps(facts: dict[str, Any]) -> None:
    """Raise ValueError unless float32 decides every recorded choice as float64 does."""
    gaps = [*facts["smallest_greedy_gap"].values(), *facts["smallest_draft_gap"].values()]
    if min(gaps) < MIN_LOGIT_GAP:
        raise ValueError(f"logit gaps must be at least {MIN_LOGIT_GAP}, got {min(gaps):.4f}: choose another seed")
    router = facts["smallest_router_gap"]
    if router is not None and router < MIN_ROUTER_GAP:
        raise ValueError(f"router gaps must be at least {MIN_ROUTER_GAP}, got {router:.2g}: choose another seed")


def main(names: list[str]) -> None:
    """Make the named models, or all."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in names or MODELS:
        folder = write_model(name, HERE / name)
        arrays, facts = expected_values(folder)
        check_gaps(facts)
        write_safetensors(folder / "golden.safetensors", arrays)
        (folder / "golden.json").write_text(json.dumps(facts, indent=2) + "\n")
        size = sum(path.stat().st_size for path in folder.iterdir())
        logging.info("%s: %d bytes, %s", name, size, json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
