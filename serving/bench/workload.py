"""What a benchmark asks of an engine: prompts as token ids, and how many tokens each is to be answered with.

Lengths of random requests are known before a model is loaded, so that what cannot fit is refused at once. All of it
follows from the seed, and a request does not depend on how many are drawn.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from random import Random
from typing import cast

from gdn_jax.serving.config import SettingError
from gdn_jax.serving.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

# Of the conversations in a file, those with 4 to 1,024 tokens of prompt and at most 2,048 in all, as vLLM takes them.
MOST_REQUESTS = 1_000_000  # of one run: they are all made before it begins
_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048
_PERHAPS_LONGER = ", or raise max_model_len if the model takes more"  # where the model is not known


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long a request is, in tokens.

    Attributes:
        prompt: of the prompt.
        answer: of each answer to it.
    """

    prompt: int
    answer: int


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """A prompt, and how many tokens it is to be answered with.

    Attributes:
        token_ids: the prompt.
        num_answer_tokens: of each answer.
    """

    token_ids: list[int]
    num_answer_tokens: int

    @property
    def lengths(self) -> Lengths:
        """How long it is."""
        return Lengths(prompt=len(self.token_ids), answer=self.num_answer_tokens)


@dataclass(frozen=True, kw_only=True)
class RandomWorkload:
    """Prompts of random tokens.

    Attributes:
        seed: draws lengths and tokens.
        input_len: tokens of a prompt after the common prefix.
        output_len: tokens of an answer.
        range_ratio: in [0, 1); lengths lie in [length * (1 - range_ratio), length * (1 + range_ratio)], uniformly.
        prefix_len: tokens that all prompts begin with.

    Raises:
        SettingError: a length is not positive, or the ratio out of range.
    """

    seed: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        """Check every value."""
        check_at_least(1, output_len=self.output_len)
        check_at_least(0, input_len=self.input_len, random_prefix_len=self.prefix_len)
        if not 0 <= self.range_ratio < 1:
            raise SettingError(f"random_range_ratio must be in [0, 1); got {self.range_ratio}; use 0 for equal lengths")
        if self.prefix_len + self._range(self.input_len)[0] < 1:
            raise SettingError(
                f"a prompt must have at least one token; got an input_len of {self.input_len}, a random_range_ratio of "
                f"{self.range_ratio} and a random_prefix_len of {self.prefix_len}; raise input_len"
            )

    def lengths(self, count: int) -> list[Lengths]:
        """Return how long the first `count` requests are."""
        draw = Random(f"{self.seed} lengths")  # of text, as numbers lose their sign
        (low, high), (least, most) = self._range(self.input_len), self._range(self.output_len)
        return [
            Lengths(prompt=self.prefix_len + draw.randint(low, high), answer=draw.randint(max(least, 1), most))
            for _ in range(count)
        ]

    def requests(self, count: int, tokenizer: Tokenizer) -> list[BenchRequest]:
        """Return the first `count` requests, of any ids that have a token."""
        known = range(tokenizer.num_tokens)
        prefix = Random(f"{self.seed} prefix").choices(known, k=self.prefix_len)
        requests: list[BenchRequest] = []
        for index, lengths in enumerate(self.lengths(count)):
            own = Random(f"{self.seed} {index}").choices(known, k=lengths.prompt - self.prefix_len)
            requests.append(BenchRequest(token_ids=prefix + own, num_answer_tokens=lengths.answer))
        return requests

    def _range(self, length: int) -> tuple[int, int]:
        ratio = Fraction(str(self.range_ratio))  # as written: 100 * (1 + 0.1) is above 110 in floats
        return floor(length * (1 - ratio)), ceil(length * (1 + ratio))


@dataclass(frozen=True, kw_only=True)
class ShareGPTWorkload:
    """First questions of conversations in a JSON file of ShareGPT's form, in an order that the seed draws.

    Attributes:
        seed: draws the order.
        path: a list of objects with `conversations`, each a list of objects with `value`, the text of a turn.
            Conversations of another form are left out, as are those that are too long or too short.
        output_len: tokens of each answer; None: as many as the conversation's own first answer has.

    Raises:
        SettingError: the length is not positive.
    """

    seed: int
    path: str
    output_len: int | None = None

    def __post_init__(self) -> None:
        """Check the length."""
        if self.output_len is not None:
            check_at_least(1, output_len=self.output_len)

    def check(self) -> None:
        """Read the file once, before a model is loaded.

        Raises:
            SettingError: it cannot be read, or has another form.
        """
        self._openings()

    def requests(self, count: int, tokenizer: Tokenizer, max_model_len: int = _MOST_TOKENS) -> list[BenchRequest]:
        """Return the first `count` requests; a file with fewer conversations of fitting length is asked again.

        Raises:
            SettingError: the file cannot be read, has another form, or no conversation that fits.
        """
        found: list[BenchRequest] = []
        openings = self._openings()
        Random(self.seed).shuffle(openings)
        for question, answer in openings:
            if len(found) == count:
                break
            request = BenchRequest(
                token_ids=tokenizer.encode(question),
                num_answer_tokens=self.output_len or len(tokenizer.encode(answer)),
            )
            if self._fits(request.lengths, max_model_len):
                found.append(request)
        if not found:
            raise SettingError(
                f"dataset_path must hold conversations of {_LEAST_TOKENS} to {_MOST_PROMPT_TOKENS} tokens of prompt "
                f"and at most {min(_MOST_TOKENS, max_model_len)} in all; got {len(openings)} in {self.path}, none of "
                "them so; use another file, or raise max_model_len"
            )
        if len(found) < count:
            _LOG.warning("%d of the %d requests ask again what others have asked", count - len(found), count)
        return [found[index % len(found)] for index in range(count)]

    def _fits(self, lengths: Lengths, max_model_len: int) -> bool:
        shortest = lengths.prompt if self.output_len is not None else min(lengths.prompt, lengths.answer)
        return (
            shortest >= _LEAST_TOKENS
            and lengths.prompt <= _MOST_PROMPT_TOKENS
            and lengths.prompt + lengths.answer <= min(_MOST_TOKENS, max_model_len)
        )

    def _openings(self) -> list[tuple[str, str]]:
        """Return the first two turns of each conversation that has them."""
        try:
            entries: object = json.loads(Path(self.path).read_text("utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise SettingError(f"dataset_path must be a file of JSON; got {self.path}: {error}") from error
        if not isinstance(entries, list):
            raise SettingError(
                f"dataset_path must hold a list of conversations; {self.path} holds a {type(entries).__name__}"
            )
        turns = [_first_turns(entry) for entry in cast("list[object]", entries)]
        found = [(pair[0], pair[1]) for pair in turns if len(pair) == 2]
        if not found:
            raise SettingError(
                "dataset_path must hold objects with `conversations`, each a list of objects with `value`, the text of "
                f"a turn; {self.path} has none with two turns"
            )
        return found


def _first_turns(entry: object) -> list[str]:
    """Return the first two turns of a conversation of ShareGPT's form; fewer where it is of another."""
    turns = cast("dict[str, object]", entry).get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        return []
    opening = [
        cast("dict[str, object]", turn).get("value") if isinstance(turn, dict) else None
        for turn in cast("list[object]", turns)[:2]
    ]
    return [text for text in opening if isinstance(text, str) and _is_unicode(text)]


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: JSON may hold halves of a character, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_at_least(least: int, **numbers: int) -> None:
    """Check settings by name.

    Raises:
        SettingError: one is below `least`.
    """
    for name, value in numbers.items():
        if value < least:
            raise SettingError(f"{name} must be at least {least}; got {value}")


def check_at_most(most: int, **numbers: int) -> None:
    """Check settings by name.

    Raises:
        SettingError: one is above `most`.
    """
    for name, value in numbers.items():
        if value > most:
            raise SettingError(f"{name} must be at most {most}; got {value}")


def check_fit(requests: Sequence[Lengths], max_model_len: int, longer: str = _PERHAPS_LONGER) -> None:
    """Check that an engine takes every request.

    Args:
        requests: their lengths.
        max_model_len: what it takes.
        longer: the rest of a remedy, what would let longer ones in.

    Raises:
        SettingError: one is too long.
    """
    longest = max(requests, key=lambda lengths: lengths.prompt + lengths.answer)
    if longest.prompt + longest.answer > max_model_len:
        raise SettingError(
            f"a prompt and its answer must be at most max_model_len ({max_model_len}) together; got {longest.prompt} + "
            f"{longest.answer} = {longest.prompt + longest.answer}; ask for less{longer}"
        )
