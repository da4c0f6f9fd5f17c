"""Prose from the formats that packages keep it in: R data, SWORD modules, dictd dictionaries, plain text."""

import gzip
import html
import re
import struct
import zlib
from collections.abc import Iterator

from scripts.gather_text.clean import decode

_R_STRINGS, _R_STRING = 16, 9  # type codes in R's serialised data
_R_HEADER = struct.Struct(">2s4i")  # "X\n", format version, two versions of R, length of the encoding's name


def texts(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Yield path and text of each book in one file of an archive; nothing if it is no text.

    A book of R data gets its title as the last part of its path, as in "data/Rdata.rdb/northanger-abbey".
    """
    if path.endswith(".rdb"):
        for lines in _character_vectors(content):
            text = "\n".join(lines)
            title = next(line for line in text.split("\n") if line.strip())
            yield f"{path}/{'-'.join(title.lower().split())}", text
    elif path.endswith((".bzz", ".czz")):
        for number, markup in enumerate(_zlib_streams(content, gap=0)):
            yield f"{path}/{number}", plain_osis(markup.decode("utf-8", errors="replace"))
    else:
        text = decode(gzip.decompress(content) if path.endswith((".gz", ".dz")) else content)
        if text is not None:
            yield path, text.replace("\r\n", "\n")


def _zlib_streams(content: bytes, gap: int) -> Iterator[bytes]:
    """Yield what each of the zlib streams in `content` holds, before each of which stand `gap` bytes."""
    while len(content) > gap:
        stream = zlib.decompressobj()
        yield stream.decompress(content[gap:])
        content = stream.unused_data if gap else stream.unused_data.lstrip(b"\0")  # modules fill holes with zeros


def _character_vectors(content: bytes) -> Iterator[list[str]]:
    """Yield the vectors of strings among the objects of R's lazy-load database, each after its length in 4 bytes."""
    for serialised in _zlib_streams(content, gap=4):
        *_, encoding_length = _R_HEADER.unpack_from(serialised)
        at = _R_HEADER.size + encoding_length
        kind, count = struct.unpack_from(">2i", serialised, at)
        if kind & 0xFF != _R_STRINGS:
            continue
        at, lines = at + 8, []
        for _ in range(count):
            flags, length = struct.unpack_from(">2i", serialised, at)
            if flags & 0xFF != _R_STRING:
                raise ValueError(f"a string was expected at byte {at} of R data, not an object of type {flags & 0xFF}")
            at += 8
            lines.append(serialised[at : at + max(length, 0)].decode("utf-8"))  # -1 is a missing string
            at += max(length, 0)
        yield lines


def plain_osis(markup: str) -> str:
    """Return the text of a SWORD module's markup: notes and references to verses out, a blank line per paragraph."""
    text = re.sub(
        r"<note\b.*?</note>|<list\b.*?</list>|<table\b.*?</table>|<milestone\b[^>]*>", " ", markup, flags=re.DOTALL
    )
    text = re.sub(r"<(?:div|chapter|/?title|lg|/?l|p|/p|lb)\b[^>]*>", "\n\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if re.search(r"[a-z]{2}", part))
