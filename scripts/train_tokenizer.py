"""Train the tokenizer of the pico model, and write what its folder says about text.

    python scripts/train_tokenizer.py --text FOLDER [FOLDER ...] --out gdn_jax/models/pico

Each FOLDER holds train/DOMAIN[-N].jsonl.xz and held_out/DOMAIN[-N].jsonl.xz, one JSON object with `text` per line.
The tokenizer is byte-level BPE with the rules of the Qwen3.5 family: text in NFC, digits one by one, combining marks
part of words, and the family's special tokens behind the vocabulary. Printed is how many characters of held-out text
a token has.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from gdn_jax.training.text_files import domain_files, read_documents

VOCABULARY = 4096  # ids in all
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)  # kept in decoding
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
WEIGHTS = {
    "code": 0.40, "prose": 0.20, "docs": 0.12, "glosses": 0.06,
    "chat": 0.08, "tools": 0.06, "arithmetic": 0.03, "json": 0.05,
}  # fmt: skip
_LONGEST = 30_000  # characters of one document: a book must not be all that is seen of prose
_TAGS = re.compile("|".join(map(re.escape, (*SPECIAL, *ADDED))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, and say how well it does; return the exit status."""
    options = _parse(arguments)
    tokenizer = train(sample(options.text, round(options.megabytes * 1_000_000)), show_progress=not options.quiet)
    write(tokenizer, options.out)
    for domain in WEIGHTS:
        texts = list(islice(_texts(options.text, "held_out", domain), 2000))
        if texts:
            num_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))
            sys.stdout.write(f"{domain:12}{sum(map(len, texts)) / num_tokens:6.2f} characters per token\n")
    return 0


def sample(folders: Sequence[Path], num_bytes: int, seed: int = 1) -> list[str]:
    """Return documents of every domain, `num_bytes` in all by the domains' weights, or what there is of a domain."""
    chosen: list[str] = []
    for domain, weight in WEIGHTS.items():
        texts = [text[:_LONGEST] for text in _texts(folders, "train", domain)]
        random.Random(f"{domain}/{seed}").shuffle(texts)
        left = weight * num_bytes
        for text in texts:
            if left <= 0:
                break
            chosen.append(text)
            left -= len(text.encode())
    return chosen


def train(texts: Sequence[str], *, show_progress: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer of exactly `VOCABULARY` ids.

    Raises:
        ValueError: the text is too little for so many ids.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    # Tags are ids of their own, so nothing is to be merged in them or across them.
    tokenizer.train_from_iterator((piece for text in texts for piece in _TAGS.split(text) if piece), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    if (size := tokenizer.get_vocab_size(with_added_tokens=True)) != VOCABULARY:
        raise ValueError(f"the text must be enough for {VOCABULARY} ids; it was for {size}. Give more text")
    return tokenizer


def write(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    end_of_text, _, end_of_turn = map(tokenizer.token_to_id, SPECIAL)
    config: dict[str, object] = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    generation: dict[str, object] = {
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
    }
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the pico model.")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders with train/ and held_out/")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--megabytes", type=float, default=40, help="how much text to learn from")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


def _texts(folders: Sequence[Path], part: str, domain: str) -> Iterator[str]:
    """Yield the documents of a domain."""
    for path in domain_files(folders, part, domain):
        for document in read_documents(path):
            yield document["text"]


if __name__ == "__main__":
    sys.exit(main())
