"""One package to documents, no more than its share, and nothing that was there before."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from scripts.gather_text import books, clean, wordnet
from scripts.gather_text.archives import members
from scripts.gather_text.dedupe import SeenLines
from scripts.gather_text.sources import Source, SourceList
from scripts.gather_text.split import pieces

_TEST = re.compile(r"(?:^|/)(?:tests?|testing|test_\w+)/|(?:^|/)(?:test_[^/]*|[^/]*_tests?|conftest)\.py$")
_TESTS_PER_OTHER = 0.15  # characters of tests for each character of other code


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of text to train on or, if held out, to judge by."""

    text: str
    source: str
    domain: str
    held_out: bool


@dataclass(kw_only=True)
class CleanTexts:
    """What one archive gives.

    Attributes:
        texts: Per domain, whole texts, in an order that depends on their paths alone.
        dropped: Files by the reason they were dropped for.
    """

    texts: dict[str, list[str]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)


def clean_texts(source: Source, sources: SourceList, archive: Path) -> CleanTexts:
    """Return the texts in the archive of `source` that count, clean, and no more of them than its caps allow.

    Each call stands for itself, so that archives may be read side by side.
    """
    result = CleanTexts()
    found = members(archive, lambda path: any(sources.wants(source, domain, path) for domain in source.domains))
    files = sorted(found, key=lambda file: _order(file[0]))
    for domain in source.domains:
        if domain == "glosses":
            data = [content.decode("utf-8") for _, content in sorted(files)]
            result.texts[domain] = [text for each in data for text in wordnet.documents(each)]
            continue
        if domain == "prose":
            cleaned = _clean_books(source, sources, files, result.dropped)
        else:
            chosen = [file for file in files if sources.wants(source, domain, file[0])]
            cleaned = _clean_files(domain, chosen, result.dropped)
        result.texts[domain] = list(_within(source.cap or sources.caps[domain], cleaned))
    return result


def documents(source: Source, clean_ones: CleanTexts, seen: SeenLines) -> Iterator[Document]:
    """Yield what is news among the texts of one source, in pieces; `seen` remembers it.

    Held-out sources should come first: what is like them in others is then left out of training.
    """
    for domain, texts in clean_ones.texts.items():
        for text in texts:
            if not seen.add(text):
                clean_ones.dropped[f"{domain}: seen before"] += 1
                continue
            for piece in [text] if domain == "glosses" else pieces(text, domain):
                held_out = source.held_out or _share_of(piece) < source.held_out_share
                yield Document(text=piece, source=source.label, domain=domain, held_out=held_out)


def _clean_files(domain: str, files: list[tuple[str, bytes]], dropped: Counter[str]) -> Iterator[tuple[str, str]]:
    for path, content in files:
        text = clean.normalise(content)
        reason = "size or encoding" if text is None else clean.why_drop(text, domain)
        if text is not None and reason is None:
            text = clean.clean_code(text) if domain == "code" else clean.clean_docs(text)
            if len(text) < clean.MIN_BYTES:
                reason = "nothing left"
            elif domain == "code" and not is_python(text):
                reason = "not Python 3"
            else:
                yield path, text
                continue
        dropped[f"{domain}: {reason}"] += 1


def _clean_books(
    source: Source, sources: SourceList, files: list[tuple[str, bytes]], dropped: Counter[str]
) -> Iterator[tuple[str, str]]:
    for packed, content in files:
        for path, raw in books.texts(packed, content):
            if not sources.wants(source, "prose", path):  # one file may hold several books
                continue
            text = clean.clean_prose(clean.plain_punctuation(raw))
            if (reason := clean.why_drop(text, "prose")) is None:
                yield path, text
            else:
                dropped[f"prose: {reason}"] += 1


def is_python(text: str) -> bool:
    """Return whether `text` parses as the Python that this runs on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that some later version will refuse
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _within(cap: int, files: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield texts until they make up `cap` characters; of tests no more than their part, and after all else."""
    taken, tests = 0, []
    for path, text in files:
        if path.endswith(".py") and _TEST.search(path):
            tests.append(text)
        elif taken + len(text) <= cap:
            taken += len(text)
            yield text
        if taken > 0.98 * cap:
            break
    room = min(_TESTS_PER_OTHER * taken, cap - taken)
    for text in tests:
        if len(text) <= room:
            room -= len(text)
            yield text


def _order(path: str) -> str:
    """Return a key that sorts paths in an order of no meaning, so that a cap leaves a fair sample."""
    return sha256(path.encode()).hexdigest()


def _share_of(text: str) -> float:
    """Return a number in [0, 1) that a text always has."""
    return int.from_bytes(sha256(text.encode()).digest()[:4]) / 2**32
