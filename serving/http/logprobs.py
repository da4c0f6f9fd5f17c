"""Log probabilities in the two shapes that clients know: entries per token for chat, parallel lists for completions.

A token that is only part of a character has no text of its own: its `bytes` are exact, and where only a name can be
given it is `bytes:` with the bytes in hexadecimal escapes, so that two such tokens stay apart.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from gdn_jax.serving.http.backend import Tokens
from gdn_jax.serving.outputs import Logprob, PositionLogprobs

_LEAST = -9999.0  # JSON has no infinity
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenNames:
    """Writes tokens as text."""

    def __init__(self, tokens: Tokens, *, as_ids: bool) -> None:
        """Write them as `token_id:N` if `as_ids`, which no two tokens share."""
        self._tokens, self._as_ids = tokens, as_ids

    def name(self, token_id: int) -> str:
        """Return a token's text."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokens.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token_id: int) -> list[int]:
        """Return the bytes that it adds to the text."""
        return list(self._tokens.token_bytes(token_id))


def chat_entries(
    token_ids: Sequence[int], reports: Sequence[PositionLogprobs | None], num_top: int, names: TokenNames
) -> list[dict[str, object]]:
    """Return `logprobs.content` of chat: one entry per token, each with its `num_top` likeliest alternatives."""

    def entry(token_id: int, found: Logprob) -> dict[str, object]:
        """Return one token's."""
        return {"token": names.name(token_id), "logprob": _finite(found.logprob), "bytes": names.bytes(token_id)}

    return [
        {
            **entry(token_id, report[token_id]),
            "top_logprobs": [entry(other, found) for other, found in _top(report, num_top)],
        }
        for token_id, report in zip(token_ids, reports, strict=True)
        if report is not None  # as only a prompt's first token has none
    ]


def prompt_entries(reports: Sequence[PositionLogprobs | None]) -> list[dict[int, dict[str, object]] | None]:
    """Return the field `prompt_logprobs`: by token id what is known of it, for each token of the prompt."""
    return [
        None
        if report is None
        else {
            token_id: {"logprob": _finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token_id, found in report.items()
        }
        for report in reports
    ]


@dataclass(frozen=True)
class Echo:
    """A prompt that stands before an answer: its text, and how many tokens it has."""

    text: str
    num_tokens: int


class CompletionLogprobs:
    """Writes `logprobs` of completions for one choice, whose offsets count on from what was written before.

    An echoed prompt comes first. Its text shows special tokens, and that of the answer does not; which token ends it is
    a matter of counting.
    """

    def __init__(self, names: TokenNames, tokens: Tokens, num_top: int, echo: Echo) -> None:
        """Begin at the first character of the choice's text.

        Args:
            names: writes tokens.
            tokens: knows their bytes.
            num_top: likeliest tokens per token; the chosen one is given besides, if it is none of them.
            echo: what stands before the answer's text.
        """
        self._names, self._tokens, self._num_top = names, tokens, num_top
        self._decoder = _Utf8Decoder(errors="replace")
        self._answer_offset, self._num_echoed = len(echo.text), echo.num_tokens
        self._offset = 0

    def write(self, token_ids: Sequence[int], reports: Sequence[PositionLogprobs | None]) -> dict[str, object]:
        """Return the four lists for the next tokens; a prompt's first token has no report."""
        return {
            "tokens": list(map(self._names.name, token_ids)),
            "token_logprobs": [
                None if report is None else _finite(report[token_id].logprob)
                for token_id, report in zip(token_ids, reports, strict=True)
            ],
            "top_logprobs": [
                None if report is None else self._alternatives(token_id, report)
                for token_id, report in zip(token_ids, reports, strict=True)
            ],
            "text_offset": list(map(self._pass, token_ids)),
        }

    def _alternatives(self, token_id: int, report: PositionLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by name, and the chosen one, however unlikely."""
        chosen = {self._names.name(token_id): _finite(report[token_id].logprob)}
        return {
            self._names.name(other): _finite(found.logprob) for other, found in _top(report, self._num_top)
        } | chosen

    def _pass(self, token_id: int) -> int:
        """Return where a token's text begins, and go on to the next one's."""
        offset = self._offset
        if self._num_echoed or not self._tokens.is_special(token_id):
            self._offset += len(self._decoder.decode(self._tokens.token_bytes(token_id)))
        if self._num_echoed:
            self._num_echoed -= 1
            if not self._num_echoed:  # the prompt may end inside a character, and its text is the client's own
                self._decoder.reset()
                self._offset = self._answer_offset
        return offset


def _top(report: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """Return the likeliest tokens, likeliest first; the chosen one is among them only if it is one of them."""
    ranked = sorted(report.items(), key=lambda item: item[1].rank or 0)
    return [(token_id, found) for token_id, found in ranked if (found.rank or 0) <= count]


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else _LEAST
