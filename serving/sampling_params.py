"""SamplingParams: what a caller may ask of one request. Names and defaults are those of vLLM.

Everything that can be checked without a model is checked at construction, so that a SamplingParams which exists is
valid. What needs the model or the prompt (ids within the vocabulary, tokens within the context) the engine checks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from reprlib import repr as short_repr
from typing import TypeGuard, cast

from gdn_jax.serving.core.errors import InvalidParameterError, RequestError, UnsupportedParameterError

GREEDY_BELOW = 1e-5  # a lower temperature would overflow float32 logits, and picks the largest logit anyway
MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_BIASES = 1024  # token ids of logit_bias
MAX_BAD_WORDS = 128
_MAX_BAD_WORD_CHARACTERS = 256  # each is tokenized twice, and its end is looked for at every token


class RequestOutputKind(Enum):
    """What each item of a stream holds; the whole answer comes of `LLM.generate` and `LLM.chat` whatever it is."""

    CUMULATIVE = 0  # all there is so far
    DELTA = 1  # what came since the item before; only completions to which something came
    FINAL_ONLY = 2  # one item, at the end


class UnknownParameterError(RequestError, TypeError):
    """A keyword that SamplingParams does not have; also a TypeError, as for any other Python call."""


@dataclass(frozen=True)
class _Rule:
    """What a value must satisfy, the same in words, and the way out."""

    admits: Callable[[object], bool]
    words: str
    remedy: str


def _is_number(value: object, kind: type = Real) -> TypeGuard[float]:
    """Return whether `value` is of a numeric kind and finite as a float, or any int if ints are asked for."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    try:
        return kind is Integral or math.isfinite(cast("float", value))
    except OverflowError:
        return False


def _is_list_of(value: object, admits: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(admits, cast("Sequence[object]", value)))


def _is_filled_str(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_token_id(value: object) -> bool:
    return _is_number(value, Integral) and bool(value >= 0)


def _is_bias(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    biases = cast("dict[object, object]", value)
    return len(biases) <= MAX_BIASES and all(map(_is_token_id, biases)) and all(map(_is_number, biases.values()))


def _is_bad_word(value: object) -> bool:
    return isinstance(value, str) and not value.isspace() and 0 < len(value) <= _MAX_BAD_WORD_CHARACTERS


def _number(low: int, high: int | float, words: str, remedy: str) -> _Rule:
    return _Rule(lambda value: _is_number(value) and low <= value <= high, words, remedy)


def _count(low: int, high: int | float, remedy: str) -> _Rule:
    words = f"an int from {low} to {high}" if math.isfinite(high) else f"an int of at least {low}"
    return _Rule(lambda value: _is_number(value, Integral) and low <= value <= high, words, remedy)


def _or_none(rule: _Rule) -> _Rule:
    def admits(value: object) -> bool:
        """Admit None too."""
        return value is None or rule.admits(value)

    return _Rule(admits, f"{rule.words}, or None", rule.remedy)


_TO_SWITCH_OFF = "use 0 to switch it off"
_LEFT_OUT = "leave it out for the default"
_FLAG = _Rule(lambda value: isinstance(value, bool), "a bool", _LEFT_OUT)
_RULES = {
    "n": _count(1, MAX_COMPLETIONS, "send several requests for more completions"),
    "presence_penalty": _number(-2, 2, "a number from -2 to 2", _TO_SWITCH_OFF),
    "frequency_penalty": _number(-2, 2, "a number from -2 to 2", _TO_SWITCH_OFF),
    "repetition_penalty": _Rule(lambda x: _is_number(x) and x > 0, "a finite number above 0", "use 1 to switch it off"),
    "temperature": _number(0, math.inf, "a finite number of at least 0", "use 0 for greedy decoding"),
    "top_p": _Rule(lambda x: _is_number(x) and 0 < x <= 1, "a number in (0, 1]", "use 1 to switch it off"),
    "top_k": _count(-1, math.inf, "use 0 (or -1) to switch it off"),
    "min_p": _number(0, 1, "a number from 0 to 1", _TO_SWITCH_OFF),
    "seed": _or_none(_Rule(lambda value: _is_number(value, Integral), "an int", _LEFT_OUT)),
    "stop": _or_none(
        _Rule(
            lambda value: _is_filled_str(value) or _is_list_of(value, _is_filled_str),
            "a non-empty str, a list of such",
            "drop what is not text",
        )
    ),
    "stop_token_ids": _or_none(
        _Rule(lambda value: _is_list_of(value, _is_token_id), "a list of token ids of at least 0", _LEFT_OUT)
    ),
    "ignore_eos": _FLAG,
    "max_tokens": _or_none(_count(1, math.inf, "use None for all that the context holds")),
    "min_tokens": _count(0, math.inf, _TO_SWITCH_OFF),
    "logprobs": _or_none(_count(0, MAX_LOGPROBS, "use 0 for the chosen token alone, None for no report")),
    "prompt_logprobs": _or_none(_count(0, MAX_LOGPROBS, "use 0 for the prompt's tokens alone, None for no report")),
    "detokenize": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "logit_bias": _or_none(
        _Rule(_is_bias, f"a dict of at most {MAX_BIASES} token ids of at least 0 to finite numbers", _LEFT_OUT)
    ),
    "bad_words": _or_none(
        _Rule(
            lambda value: _is_list_of(value, _is_bad_word) and len(cast("Sequence[str]", value)) <= MAX_BAD_WORDS,
            f"a list of at most {MAX_BAD_WORDS} str of 1 to {_MAX_BAD_WORD_CHARACTERS} characters, none of them blank",
            "ban tokens that are blank by a logit_bias of -100",
        )
    ),
    "include_stop_str_in_output": _FLAG,
    "output_kind": _Rule(
        lambda value: isinstance(value, RequestOutputKind), "a RequestOutputKind", "use RequestOutputKind.CUMULATIVE"
    ),
}
# Checked like the others, then refused unless they ask for nothing: the step function does not apply them.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "spaces_between_special_tokens": (True,),
}


def _hint_at_known_names[Params](cls: type[Params]) -> type[Params]:
    """Wrap the generated __init__, which keeps its signature, so that it says more about a misspelt keyword."""
    generated = cls.__init__
    known = list(signature(generated).parameters)[1:]

    @wraps(generated)
    def init(self: Params, *args: object, **kwargs: object) -> None:
        """Refuse what the generated __init__ would refuse without a hint."""
        if args:
            raise UnknownParameterError(
                f"{cls.__name__} takes keywords only; got {len(args)} positional value(s); "
                f"write {cls.__name__}({known[0]}=...)"
            )
        for name in kwargs:
            if name not in known:
                raise _unknown(name, known)
        generated(self, **kwargs)

    cls.__init__ = init
    return cls


@_hint_at_known_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what comes back with them.

    A token is chosen from the logits after repetition, frequency and presence penalty, logit_bias and bad_words,
    temperature, top-k, top-p and min-p, in this order. Log probabilities are those before all of it.
    `dataclasses.replace` makes a changed copy, checked anew.

    Attributes:
        n: completions per prompt, 1 to 128.
        presence_penalty: subtracted from the logit of each token that the output holds, -2 to 2.
        frequency_penalty: subtracted as often as the output holds the token, -2 to 2.
        repetition_penalty: divides the logit of each token that prompt or output holds, or multiplies it where it
            is not positive; above 0.
        temperature: divides the logits; below 1e-5 the largest logit is taken.
        top_p: keep the fewest most likely tokens whose probabilities sum to this, in (0, 1].
        top_k: keep this many most likely tokens; 0 and -1 keep all.
        min_p: drop tokens less likely than this share of the likeliest, in [0, 1].
        seed: equal seeds give equal tokens; any int, taken modulo 2^64, so -1 is a seed too. None: the engine
            draws one.
        stop: strings that end the completion; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the completion, also with `ignore_eos`.
        ignore_eos: do not end at the model's own end tokens.
        max_tokens: most tokens to generate, at least 1; None: as many as the context holds.
        min_tokens: end tokens and stop strings do not count before this many.
        logprobs: report the chosen token's log probability and this many alternatives', 0 to 20; None: no report.
        prompt_logprobs: report each prompt token's log probability and this many alternatives', 0 to 20; None: no
            report. The prompt is then computed anew, whatever the prefix cache holds.
        detokenize: make text; False leaves `text` empty and rules out stop strings.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: only True.
        logit_bias: added to the logits of these token ids, at most 1024; taken as -100 to 100 if beyond.
        bad_words: texts that the output will not hold, at most 128: of the tokens of each, written with and without a
            blank before it, the last one is never chosen where the output ends with those before it. Text that other
            tokens spell alike is not found.
        include_stop_str_in_output: keep the stop string at the end of the text.
        output_kind: what each item of a stream holds.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range; the message names it, the rule and a remedy.
        UnsupportedParameterError: a value that asks for something this engine does not apply.
        UnknownParameterError: a keyword not listed above.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    # The class checks its own values; a run-time type checker would answer first, with another error.
    __no_type_check__ = True

    def __post_init__(self) -> None:
        """Check every value, then how they go together."""
        for name, rule in _RULES.items():
            if not rule.admits(getattr(self, name)):
                raise _invalid(name, getattr(self, name), rule.words, rule.remedy)
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise UnsupportedParameterError(
                    f"{name} is not supported by this engine except at {neutral[0]!r}; "
                    f"got {short_repr(getattr(self, name))}; leave it out",
                    parameter=name,
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            words = f"at most max_tokens ({self.max_tokens})"
            raise _invalid("min_tokens", self.min_tokens, words, "lower min_tokens or raise max_tokens")
        if self.stop_strings and not self.detokenize:
            raise _invalid("stop", self.stop, "absent when detokenize is False", "drop it, or let text be made")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, whatever the seed."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, also if one str was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _invalid(name: str, value: object, words: str, remedy: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} must be {words}; got {short_repr(value)}; {remedy}", parameter=name)


def _unknown(name: str, known: list[str]) -> UnknownParameterError:
    close = get_close_matches(name, known, n=1)
    hint = f"the closest known name is {close[0]!r}" if close else f"the known names are {', '.join(known)}"
    return UnknownParameterError(f"SamplingParams has no parameter {name!r}; {hint}", parameter=name)
