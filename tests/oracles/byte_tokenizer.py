"""A small byte-level tokenizer on disk: one token per byte, a few merges, and the added tokens of the model family.

Ids 0..255 are the bytes in order, so that a test can spell any byte sequence, valid UTF-8 or not.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

MERGES = ("he", "ll", "hell", "lo", "hello", " w", " wo", "12", "\n\n")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "a b", "é!")  # the last two test the byte alphabet
NUM_TOKENS = 256 + len(MERGES) + len(SPECIAL) + len(ADDED)
END_OF_TEXT, IM_START, IM_END = range(256 + len(MERGES), 256 + len(MERGES) + 3)


def byte_ids(text: str | bytes) -> list[int]:
    """Return the ids of single bytes that spell `text`."""
    return list(text.encode() if isinstance(text, str) else text)


def _characters() -> list[str]:
    """Return the character of the byte-level alphabet for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(character): character for character in alphabet if ord(character) < 256}
    others = iter(character for character in alphabet if ord(character) >= 256)
    return [own[byte] if byte in own else next(others) for byte in range(256)]


def write_byte_tokenizer(folder: Path, **config: object) -> Path:
    """Write tokenizer.json, and tokenizer_config.json with `config`, into `folder`; return the folder."""
    characters = _characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    pieces = ["".join(characters[byte] for byte in merge.encode()) for merge in MERGES]
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        cut = next(cut for cut in range(len(piece) - 1, 0, -1) if piece[:cut] in vocab and piece[cut:] in vocab)
        merges.append((piece[:cut], piece[cut:]))
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    words = Regex(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    return folder
