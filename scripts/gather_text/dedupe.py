"""What was seen before, by its lines."""

from hashlib import blake2b

_MIN_LINE = 20  # shorter lines are everywhere
_MAX_SEEN = 0.5


class SeenLines:
    """The lines of all documents so far. Not for two threads."""

    def __init__(self) -> None:
        self._lines: set[bytes] = set()
        self._documents: set[bytes] = set()

    def add(self, text: str) -> bool:
        """Return whether `text` is news, and remember it if it is.

        It is none if it, or half of its lines of some length, was added before. Blanks around lines do not count.
        """
        whole = _digest(" ".join(text.split()))
        if whole in self._documents:
            return False
        lines = {_digest(line.strip()) for line in text.split("\n") if len(line.strip()) >= _MIN_LINE}
        if lines and len(lines & self._lines) > _MAX_SEEN * len(lines):
            return False
        self._documents.add(whole)
        self._lines |= lines
        return True


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
