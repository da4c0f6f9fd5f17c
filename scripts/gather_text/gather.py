"""One package to documents, no more than its share, and nothing that was there before."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


class Gatherer:
    """Turns archives into documents; remembers what it has seen, so that nothing comes twice.

    Held-out sources should come first: what is like them in others is then left out of training.
    """

    def __init__(self, sources: SourceList) -> None:
        self._sources = sources
        self._seen = SeenLines()
        self.dropped: Counter[str] = Counter()  # files by the reason they were dropped for

    def documents(self, source: Source, archive: Path) -> Iterator[Document]:
        """Yield the documents of one source, in an order that depends on the paths in its archive alone."""
        files: dict[str, list[tuple[str, bytes]]] = {domain: [] for domain in source.domains}
        whole_file = {"prose", "glosses"} & set(source.domains)
        for path, content in members(archive):
            for domain, found in files.items():
                # The files of books are named after they are opened, since one may hold several.
                if whole_file or self._sources.wants(source, domain, path):
                    found.append((path, content))
        for domain, found in files.items():
            for text in self._texts(source, domain, found):
                held_out = source.held_out or _share_of(text) < source.held_out_share
                yield Document(text=text, source=source.label, domain=domain, held_out=held_out)

    def _texts(self, source: Source, domain: str, files: list[tuple[str, bytes]]) -> Iterator[str]:
        if domain == "glosses":
            for path, content in sorted(files):
                if self._sources.wants(source, domain, path):
                    yield from wordnet.documents(content.decode("utf-8"))
            return
        cap = source.cap or self._sources.caps[domain]
        if domain == "prose":
            cleaned: Iterable[tuple[str, str]] = self._clean_books(source, files)
        else:
            cleaned = self._clean_files(domain, sorted(files, key=lambda file: _order(file[0])))
        for text in _within(cap, cleaned):
            yield from pieces(text, domain)

    def _clean_files(self, domain: str, files: list[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
        for path, content in files:
            text = clean.normalise(content)
            reason = "size or encoding" if text is None else clean.why_drop(text, domain)
            if text is not None and reason is None:
                text = clean.clean_code(text) if domain == "code" else clean.clean_docs(text)
                reason = self._why_drop_cleaned(text, domain)
                if reason is None:
                    yield path, text
                    continue
            self.dropped[f"{domain}: {reason}"] += 1

    def _why_drop_cleaned(self, text: str, domain: str) -> str | None:
        if len(text) < clean.MIN_BYTES:
            return "nothing left"
        if domain == "code" and not is_python(text):
            return "not Python 3"
        return None if self._seen.add(text) else "seen before"

    def _clean_books(self, source: Source, files: list[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
        for archived, content in files:
            if not any(
                pattern.startswith(archived) or self._sources.wants(source, "prose", archived)
                for pattern in source.paths
            ):
                continue
            for path, text in books.texts(archived, content):
                if self._sources.wants(source, "prose", path) and clean.why_drop(text, "prose") is None:
                    text = clean.clean_prose(clean.plain_punctuation(text))
                    if self._seen.add(text):
                        yield path, text


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
        if _TEST.search(path):
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
