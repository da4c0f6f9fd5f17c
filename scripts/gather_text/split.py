"""Long documents in pieces that end where a reader would pause."""

import re

MAX_CHARACTERS = 8000
MIN_CHARACTERS = 120

# Where each kind of text may be cut, best places first. A piece ends where a match ends.
_BORDERS = {
    "code": [r"\n\n+(?=[^\s#)\]}\"'])", r"\n\n+(?=    (?:@|def |class |async def ))", r"\n\n+", r"\n"],
    "docs": [r"\n\n+(?=[^\n]+\n([=\-~^\"*#+`'.])\1{2,}\n|#{1,6} )", r"\n\n+(?=\S)", r"\n\n+", r"\n"],
    "prose": [r"\n\n+(?=(?:CHAPTER|Chapter|BOOK|Book|ACT|SCENE|PART)\b)", r"\n\n+", r"\n", r"[.!?][\"')]* ", r" "],
}


def pieces(text: str, domain: str, limit: int = MAX_CHARACTERS) -> list[str]:
    """Return `text` in pieces of at most `limit` characters, whose sum, blank edges aside, is `text`.

    Pieces too short to learn from are left out.
    """
    cut = _cut(text, [re.compile(border) for border in _BORDERS[domain]], limit)
    return [piece.strip("\n") + "\n" for piece in cut if len(piece.strip()) >= MIN_CHARACTERS]


def _cut(text: str, borders: list[re.Pattern[str]], limit: int) -> list[str]:
    """Cut at the first border; what is still too long, at the next. Neighbours are joined while they fit."""
    if len(text) <= limit:
        return [text]
    if not borders:
        return [text[at : at + limit] for at in range(0, len(text), limit)]
    ends = [found.end() for found in borders[0].finditer(text)]
    cut: list[str] = []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        part = text[start:end]
        if len(part) > limit:
            cut.extend(_cut(part, borders[1:], limit))
        elif cut and len(cut[-1]) + len(part) <= limit:
            cut[-1] += part
        else:
            cut.append(part)
    return cut
