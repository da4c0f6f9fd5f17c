"""Checkpoints whose every token and every draft is known beforehand: small models that are a table.

The last token's class picks a row of `table`, the logits of the next token; the layers hold states and keys like any
other, and add nothing. The MTP head reads the same table, in a row that may be another one, so that a test decides
after which tokens its drafts are right: after all, some, or none. At rest on disk it is a Qwen3.5 release like any.

How. An embedding is two one-hot vectors of its class c: of c, and of the row that the head takes for it. The output
matrix reads the first; the head moves the second to the first's place. Norms scale both to 1, so that target and head
give the same logits, up to rounding, where the rows are the same: they draw alike, too, at any temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from oracles import checkpoint_text
from oracles.checkpoints import write_checkpoint

VOCABULARY = 320
NUM_CLASSES = 32  # half of the hidden size
TEXT = "abcdefghijklmnopqrstuvwxyz \u20ac"  # the last character is three tokens
# Two layers, one of each kind: steps compile fast, and every kind of state is there.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2 * NUM_CLASSES,
    "layer_types": ("linear_attention", "full_attention"),
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "intermediate_size": 32,
    "tie_word_embeddings": False,
    "vision": False,
    "dtype": "float32",
}
_SIZE = 8.0  # of an embedding's ones; far above the epsilon of the norms
_NEVER = -40.0  # logit of tokens that never come
PEAK = 6.0  # logit of the successor in `successor_table`


def alphabet() -> tuple[int, ...]:
    """Return the ids of the tokens that come, by class: the bytes of TEXT, then the two end tokens."""
    tokens, _, added = checkpoint_text.vocabulary(VOCABULARY)
    letters = checkpoint_text.byte_alphabet()
    return (*(tokens[letters[byte]] for byte in TEXT.encode()), added["<|im_end|>"], added["<|endoftext|>"])


ALPHABET = alphabet()
END_CLASS = NUM_CLASSES - 2  # of <|im_end|>; <|endoftext|> follows
NUM_TOKENS = checkpoint_text.num_tokens(VOCABULARY)


def successor_table(period: int = NUM_CLASSES) -> np.ndarray:
    """Return logits [classes, classes] under which each class is followed by the next one, up to `period` of them.

    The last of those, and the classes beyond, are followed by the first. All other logits are random and at most half
    of PEAK: at temperature 1 one token in three is another.
    """
    table = np.random.RandomState(0).uniform(0.0, PEAK / 2, (NUM_CLASSES, NUM_CLASSES))
    classes = np.arange(NUM_CLASSES)
    table[classes, np.where(classes < period, (classes + 1) % period, 0)] = PEAK
    return table


def wrong_after(*classes: int) -> tuple[int, ...]:
    """Return the rows of a head that takes another class for these, and is right everywhere else."""
    return tuple((row + NUM_CLASSES // 2) % NUM_CLASSES if row in classes else row for row in range(NUM_CLASSES))


PERFECT = wrong_after()
MIXED = wrong_after(1, 2, 4, 7, 11, 16, 17, 20, 26, 29)  # between two of them 0 to 5 right ones
HOPELESS = wrong_after(*range(NUM_CLASSES))


@dataclass(frozen=True, kw_only=True)
class Markov:
    """A written checkpoint, and what it must answer.

    Attributes:
        folder: of its files.
        table: logits [classes, classes] of the next class.
        head: the row of the table that the MTP head reads, by class.
    """

    folder: Path
    table: np.ndarray
    head: tuple[int, ...]

    @cached_property
    def _best(self) -> list[int]:
        return self.table.argmax(axis=1).tolist()

    def next_token(self, token: int) -> int:
        """Return the greedy choice after a token."""
        return ALPHABET[self._best[class_of(token)]]

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy answer of so many tokens."""
        tokens = list(prompt[-1:])
        for _ in range(count):
            tokens.append(self.next_token(tokens[-1]))
        return tokens[1:]

    def drafts(self, token: int, count: int) -> list[int]:
        """Return the greedy drafts after a pending token."""
        drafts: list[int] = []
        for _ in range(count):
            token = ALPHABET[self._best[self.head[class_of(token)]]]
            drafts.append(token)
        return drafts

    def num_right(self, token: int, count: int) -> int:
        """Return how many leading greedy drafts after a pending token are right."""
        wanted = self.answer([token], count)
        pairs = enumerate(zip(self.drafts(token, count), wanted, strict=True))
        return next((index for index, (draft, right) in pairs if draft != right), count)


def class_of(token: int) -> int:
    """Return a token's class; tokens outside the alphabet have one too, so that any prompt will do."""
    return ALPHABET.index(token) if token in ALPHABET else token % NUM_CLASSES


def prompt_before(kind: int, length: int, seed: int = 0) -> list[int]:
    """Return a random prompt after which the greedy answer of a successor model begins with class `kind`."""
    ids = np.random.RandomState(seed).randint(0, 300, length).tolist()
    return [*ids[:-1], ALPHABET[(kind - 1) % NUM_CLASSES]]


def write_markov(folder: Path, *, head: Sequence[int] = PERFECT, table: np.ndarray | None = None) -> Markov:
    """Write a checkpoint.

    Args:
        folder: made if missing.
        head: which row of the table the MTP head reads for each class.
        table: logits [classes, classes]; by default `successor_table()`.
    """
    table = successor_table() if table is None else table

    def edit(weights: dict[str, np.ndarray]) -> None:
        """Turn random weights into the table, the layers' own parts aside."""
        for name, array in weights.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                array[:] = 0.0  # layers compute and remember, and add nothing
        classes = np.asarray([class_of(token) for token in range(VOCABULARY)])
        one_hot = np.eye(NUM_CLASSES)
        embedding = np.concatenate([one_hot[classes], one_hot[np.asarray(head)[classes]]], axis=1)
        output = np.full((VOCABULARY, NUM_CLASSES), _NEVER)
        output[list(ALPHABET)] = table.T
        output[NUM_TOKENS:] = table.max() + 2.0  # rows without a token: must never be chosen, nor drafted
        move = np.concatenate([np.zeros_like(one_hot), one_hot], axis=1)  # [C, 2C]: the second half
        weights["embed_tokens.weight"][:] = _SIZE * embedding
        weights["lm_head.weight"][:] = np.concatenate([output, np.zeros_like(output)], axis=1)
        weights["norm.weight"][:] = NUM_CLASSES**-0.5 - 1.0  # two ones in 2C entries have a mean square of 1 / C
        weights["mtp.norm.weight"][:] = (2 * NUM_CLASSES) ** -0.5 - 1.0  # here it is one
        weights["mtp.pre_fc_norm_embedding.weight"][:] = 0.0
        weights["mtp.fc.weight"][:] = 0.0
        weights["mtp.fc.weight"][:NUM_CLASSES, : 2 * NUM_CLASSES] = move

    write_checkpoint(folder, "q35-dense", 11, edit=edit, **SIZES)
    return Markov(folder=folder, table=table, head=tuple(head))
