"""Text to token ids and back, and what a model folder says about ending and sampling.

Byte-level BPE as published: ids come from `tokenizer.json` alone, no BOS is ever added. Added tokens that stand in a
text (`<|im_start|>`, `<think>`, ...) become their ids wherever the text comes from, as in the engines people compare
with; a server that must not let a user forge a turn has to refuse such text itself. A byte-level token is a fixed run
of bytes, and text is the UTF-8 of the runs joined: that is what makes incremental decoding exact (`detokenizer.py`).

A model's vocabulary is padded beyond its tokenizer's: ids from `num_tokens` on have no token and decode to nothing.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import decoders, pre_tokenizers

from gdn_jax.serving.core.errors import InvalidPromptError, StartupError


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(table.values()))
    return table | dict(zip(alphabet[len(table) :], others, strict=True))


_BYTE_OF_CHARACTER = _byte_of_character()


# Keys of generation_config.json that change sampling and are not applied, each with the value at which it does nothing.
_NOT_APPLIED: dict[str, object] = {
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "num_beams": 1,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_new_tokens": 0,
    "max_new_tokens": None,
    "stop_strings": None,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What `generation_config.json` says of sampling and ending; a key it leaves out has its neutral value.

    Attributes:
        temperature: 0 is greedy; 0 too when the file says `do_sample: false`.
        top_p: mass kept, in (0, 1].
        top_k: number of tokens kept; 0 keeps all.
        min_p: least probability kept, relative to the largest, in [0, 1].
        repetition_penalty: above 0; 1 is none.
        presence_penalty: -2 to 2; 0 is none.
        frequency_penalty: -2 to 2; 0 is none.
        eos_token_ids: end tokens in the file's order; empty when it names none.
        not_applied: "name=value" of what else the file asks of sampling: nothing here applies it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    not_applied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = {
            "temperature": ("at least 0 and finite", 0 <= self.temperature < inf),
            "top_p": ("in (0, 1]", 0 < self.top_p <= 1),
            "top_k": ("0 (off) or more", self.top_k >= 0),
            "min_p": ("in [0, 1]", 0 <= self.min_p <= 1),
            "repetition_penalty": ("above 0 and finite", 0 < self.repetition_penalty < inf),
            "presence_penalty": ("in [-2, 2]", -2 <= self.presence_penalty <= 2),
            "frequency_penalty": ("in [-2, 2]", -2 <= self.frequency_penalty <= 2),
        }
        for name, (rule, holds) in rules.items():
            if not holds:
                raise StartupError(
                    f"{name} in generation_config.json must be {rule}; got {getattr(self, name)}. Correct the file"
                )

    @classmethod
    def from_folder(cls, folder: Path) -> "GenerationDefaults":
        """Read `generation_config.json`; a folder without one has the neutral defaults and no end tokens.

        Raises:
            StartupError: the file is not a JSON object, or a value has the wrong type or lies out of range.
        """
        raw = read_json_object(folder / "generation_config.json")
        numbers: dict[str, float] = {}
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := raw.get(name)) is not None:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise StartupError(f"{name} in generation_config.json must be a number; got {value!r}")
                numbers[name] = float(value)
        if raw.get("do_sample") is False:
            numbers["temperature"] = 0.0
        top_k = raw.get("top_k")
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int)):
            raise StartupError(f"top_k in generation_config.json must be a whole number; got {top_k!r}")
        eos = raw.get("eos_token_id")
        eos_values = cast("list[object]", eos) if isinstance(eos, list) else [eos]
        return cls(
            **numbers,
            top_k=max(top_k or 0, 0),  # -1 is the other common spelling of "off"
            eos_token_ids=_token_ids([value for value in eos_values if value is not None], "generation_config.json"),
            not_applied=tuple(
                f"{name}={raw[name]!r:.40}"
                for name, neutral in _NOT_APPLIED.items()
                if raw.get(name) not in (None, neutral)
            ),
        )


class Tokenizer:
    """The tokenizer of a model folder. Nothing changes after construction, so any thread may call it.

    Attributes:
        num_tokens: one more than the largest real id; sampling must mask every id from here to the model's vocabulary.
        vocab_size: number of ids of the model, at least `num_tokens`.
        end_token_ids: ids that end a text, first source first (see `_end_token_ids`).
        generation_defaults: what `generation_config.json` says.
        special_tokens: the texts of the special tokens.
    """

    def __init__(
        self,
        folder: Path | str,
        vocab_size: int,
        *,
        config_eos: Sequence[int] = (),
        model_folder: Path | str | None = None,
    ) -> None:
        """Load `tokenizer.json` and `generation_config.json`.

        Args:
            folder: holds tokenizer.json.
            vocab_size: number of ids the model has, padding included.
            config_eos: the end tokens that config.json names.
            model_folder: what ends a text of the model and how it likes to be sampled is read here; None: in `folder`.

        Raises:
            StartupError: a file is missing or unreadable, the tokenizer has more ids than the model or is not
                byte-level, or an end token lies outside the model's vocabulary.
        """
        folder = Path(folder)
        self._tokenizer = _load(folder / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = tuple(sorted(added[token_id].content for token_id in self._special_ids))
        self.num_tokens = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = vocab_size
        if self.num_tokens > vocab_size:
            raise StartupError(
                f"the tokenizer must fit the model's vocabulary of {vocab_size}; its largest id is "
                f"{self.num_tokens - 1}. Use the tokenizer.json that was published with these weights"
            )
        model_folder = folder if model_folder is None else Path(model_folder)
        self.generation_defaults = GenerationDefaults.from_folder(model_folder)
        self.end_token_ids = self._end_token_ids(model_folder, config_eos)

    def _end_token_ids(self, folder: Path, config_eos: Sequence[int]) -> tuple[int, ...]:
        """Return the end tokens: generation_config.json's own, else config.json's, and what others add safely.

        All are files of the model: a tokenizer from elsewhere must not end its texts at other tokens.

        A chat model's config.json often names only the end of a document, so it must not replace the first source. The
        sources after the first (config.json, `eos_token` of tokenizer_config.json) count only where they name a special
        token, which text never holds by accident: exports leave default ids behind that mean an ordinary word here.
        """
        eos_text = special_token_texts(read_json_object(folder / "tokenizer_config.json")).get("eos_token")
        named = None if eos_text is None else self._tokenizer.token_to_id(eos_text)
        first = self.generation_defaults.eos_token_ids or _token_ids(config_eos, "config.json")
        further = [token_id for token_id in (*config_eos, named) if token_id in self._special_ids]
        ends = tuple(dict.fromkeys([*first, *further]))
        if outside := [token_id for token_id in ends if token_id >= self.vocab_size]:
            raise StartupError(
                f"end tokens must be ids of the model's vocabulary of {self.vocab_size}; got {outside}. "
                "Correct eos_token_id in generation_config.json or config.json"
            )
        return ends

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, added tokens in it parsed, none put around it.

        Raises:
            InvalidPromptError: the text holds a lone surrogate, which no encoding of Unicode can represent.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPromptError(
                f"text must be valid Unicode; character {error.start} is the lone surrogate "
                f"U+{ord(text[error.start]):04X}. Send the character it is half of, or U+FFFD",
                parameter="prompt",
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        real = [token_id for token_id in ids if 0 <= token_id < self.num_tokens]
        return self._tokenizer.decode(real, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for ids without a token."""
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.num_tokens else None
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token with a character outside the alphabet, e.g. a blank, is plain text
            return token.encode()

    def is_special(self, token_id: int) -> bool:
        """Say whether `skip_special_tokens` drops this id. Think and tool tags are ordinary added tokens: kept."""
        return token_id in self._special_ids


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file of a model folder; empty when the file does not exist.

    Raises:
        StartupError: the file cannot be read or is not a JSON object.
    """
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} must be readable JSON: {error}. Fetch the file again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object; got {type(value).__name__}. Fetch the file again")
    return cast("dict[str, object]", value)


def special_token_texts(tokenizer_config: dict[str, object]) -> dict[str, str]:
    """Return the named tokens of tokenizer_config.json (`eos_token`, ...): strings, or objects with `content`."""
    texts: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = tokenizer_config.get(name)
        content = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            texts[name] = content
    return texts


def _load(path: Path) -> tokenizers.Tokenizer:
    """Load a byte-level tokenizer that neither cuts nor pads."""
    if not path.is_file():
        raise StartupError(f"{path} is missing; copy the tokenizer.json that was published with the model there")
    raw = read_json_object(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise StartupError(f"{path} cannot be read as a tokenizer: {error}. Fetch the file again") from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise StartupError(
            f"{path} must decode byte-level tokens, as every model of these families does; its decoder is "
            f"{type(tokenizer.decoder).__name__}. Use the tokenizer.json that was published with these weights"
        )
    for token in cast("list[dict[str, object]]", raw.get("added_tokens", [])):
        # the library numbers added tokens itself, without a word, where the file's ids leave a gap
        if (loaded := tokenizer.token_to_id(str(token["content"]))) != token["id"]:
            raise StartupError(
                f"added tokens must follow the vocabulary of {path} without a gap; {token['content']!r} is id "
                f"{token['id']} in the file and would become {loaded}. Fetch the file again"
            )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_ids(values: Iterable[object], file: str) -> tuple[int, ...]:
    """Return `values` as token ids without repetition."""
    ids: list[int] = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StartupError(
                f"eos_token_id in {file} must be a token id or a list of them; got {value!r}. Correct the file"
            )
        ids.append(value)
    return tuple(dict.fromkeys(ids))
