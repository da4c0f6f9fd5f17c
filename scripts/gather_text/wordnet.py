"""What WordNet says about a meaning, in sentences.

Each line of its files data.noun, data.verb, data.adj and data.adv is a set of words that share a meaning, and a gloss:

    00211593 04 n 01 follow-through 0 003 @ 00211110 n 0000 ... | carrying some project ...; "I appreciated ..."

A document is a run of neighbours in a file, which are of one topic.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

_POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_DOCUMENT_CHARACTERS = 1500


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A set of words with one meaning; `kind_of` is the offset of the wider one in the same file, or None."""

    offset: str
    pos: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]
    kind_of: str | None


def parse(line: str) -> Meaning:
    """Read one line of a data file."""
    fields, _, gloss = line.partition(" | ")
    offset, _, pos, count, *rest = fields.split()
    num_words = int(count, 16)
    words = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in rest[: 2 * num_words : 2])
    pointers = rest[2 * num_words + 1 :]
    wider = next((pointers[at + 1] for at, field in enumerate(pointers[:-1]) if field == "@"), None)
    examples = tuple(found.strip() for found in re.findall(r'"([^"]+)"', gloss))
    definition = re.sub(r';?\s*"[^"]*"[^;"]*', "", gloss).strip(' ;"\n')
    return Meaning(offset=offset, pos=_POS[pos], words=words, definition=definition, examples=examples, kind_of=wider)


def documents(data: str) -> Iterator[str]:
    """Yield the meanings of one data file as documents of about 1,500 characters."""
    meanings = [parse(line) for line in data.split("\n") if line[:1].isdigit()]
    names = {meaning.offset: meaning.words[0] for meaning in meanings}
    lines: list[str] = []
    for meaning in meanings:
        if meaning.definition:
            lines.append(sentence(meaning, names.get(meaning.kind_of or "")))
        if sum(map(len, lines)) > _DOCUMENT_CHARACTERS:
            yield "\n".join(lines) + "\n"
            lines = []
    if lines:
        yield "\n".join(lines) + "\n"


def sentence(meaning: Meaning, kind: str | None) -> str:
    """Return a line about `meaning`, in one of four forms, by a hash of its place; `kind` names the wider one."""
    word, *synonyms = meaning.words
    definition, pos = meaning.definition, meaning.pos
    form = blake2b(f"{meaning.pos}{meaning.offset}".encode(), digest_size=1).digest()[0] % 4
    others, example = ", ".join(synonyms), meaning.examples[0] if meaning.examples else ""
    if form == 0:
        parts = [f"{word} ({pos}): {definition}.", f"Synonyms: {others}." if others else ""]
        parts.append("Examples: " + "; ".join(f'"{said}"' for said in meaning.examples) if meaning.examples else "")
    elif form == 1:
        parts = [
            f'The {pos} "{word}" means: {definition}.',
            f"It is a kind of {kind}." if kind and pos == "noun" else "",
        ]
        parts += [
            f"One can also say {_either(synonyms)}." if others else "",
            f'For example: "{example}"' if example else "",
        ]
    elif form == 2:
        parts = [f'What does "{word}" mean? As {_article(pos)} {pos}, it means {definition}.']
        parts += [f"Words like it: {others}." if others else "", f'One might say, "{example}"' if example else ""]
    else:
        parts = [f'Which {pos} means "{definition}"? {_either(list(meaning.words))}.']
        parts += [f"More general: {kind}." if kind else "", f'It is used as in "{example}"' if example else ""]
    return " ".join(part for part in parts if part)


def _article(pos: str) -> str:
    return "an" if pos.startswith("a") else "a"


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
