"""Stop strings over text that arrives in pieces.

The text ends at the first character that completes a stop string; of several completed by the same character, the one
listed first counts. Both follow from the characters alone, so the outcome is the same for any split into pieces.
Matching is Knuth-Morris-Pratt, one automaton per stop string: constant work a character, whatever the strings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gdn_jax.serving.core.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True)
class StopOutput:
    """What a piece of text releases.

    Attributes:
        text: characters that can be sent, in order after those released before.
        matched: the stop string that ended the text; None while it goes on.
    """

    text: str
    matched: str | None


class StopChecker:
    """Watches one output for its stop strings, and holds back what may still become part of one.

    Rules such as a least number of tokens are the caller's: text that must not stop is sent past this object.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_string: bool = False) -> None:
        """Watch for `stop`, none of them empty; with `include_stop_string` the match itself is released too.

        Raises:
            InvalidParameterError: a stop string is empty.
        """
        if "" in stop:
            raise InvalidParameterError(
                f"stop strings must not be empty, as every text holds the empty one; got {list(stop)!r}. Leave it out",
                parameter="stop",
            )
        self._automata = [_Automaton(text) for text in stop]
        self._include_stop_string = include_stop_string
        self._held = ""
        self._matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matched is not None

    def push(self, text: str) -> StopOutput:
        """Add text; return what can be sent now. After a match nothing is released any more."""
        if self._matched is not None:
            return StopOutput(text="", matched=self._matched)
        for index, character in enumerate(text):
            full = [automaton.text for automaton in self._automata if automaton.advance(character)]
            if full:
                self._matched = full[0]
                end = len(self._held) + index + 1
                kept = end if self._include_stop_string else end - len(self._matched)
                released, self._held = (self._held + text)[:kept], ""
                return StopOutput(text=released, matched=self._matched)
        known = self._held + text
        sendable = len(known) - max((automaton.length for automaton in self._automata), default=0)
        self._held = known[sendable:]
        return StopOutput(text=known[:sendable], matched=None)

    def flush(self) -> str:
        """End the text without a match; return what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the text ends with: `length` characters, fewer than all before the match."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        # _shorter[n]: the next shorter start of the string that its first n characters end with
        self._shorter = [0, 0]
        for character in text[1:]:
            self._shorter.append(self._extended(self._shorter[-1], character))

    def advance(self, character: str) -> bool:
        """Take the text's next character; return whether it completes the string, after which there is no next one."""
        self.length = self._extended(self.length, character)
        return self.length == len(self.text)

    def _extended(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._shorter[length]
        return length + (self.text[length] == character)
