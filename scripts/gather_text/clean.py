"""One file's text without what a model should not learn to write, or the reason to drop the file.

Out go: licence headers, copyright and author lines, addresses of e-mail, encoding lines, trailing blanks. A file is
dropped if it is no English text or no code that a person wrote: other languages, generated files, tables, minified
lines, and whatever holds the special tokens of a chat format.
"""

import re

MIN_BYTES, MAX_BYTES = 200, 200_000
_MAX_LINE = 400
_MAX_NON_ASCII = {"code": 0.02, "docs": 0.02, "prose": 0.02}
_MAX_DIGITS = 0.12
_MAX_TABLE_LINES = 0.5
_MIN_COMMON_WORDS = 0.06
_HEAD = 4000  # characters in which a file says what it is

_SPECIAL = re.compile(r"<\|[^\s|<>]{1,40}\|>|<\|im_|<\|end|</?think>|</?tool_call>|</?tool_response>")
_GENERATED = re.compile(
    r"auto-?\s?generated|automatically (?:generated|created)|generated (?:by|from|using|with|file)|@generated"
    r"|do not (?:edit|modify)|machine-generated",
    re.IGNORECASE,
)
_SHARE_ALIKE = re.compile(
    r"GNU (?:Lesser |Library |Affero )?General Public|GNU Free Documentation|\b[AL]?GPL(?:v?[23]|-[23])|Mozilla Public"
    r"|\bMPL-?2|CC[- ]BY[- ](?:NC|SA|ND)|Share-?Alike|creativecommons\.org/licenses/by-(?:sa|nc|nd)",
    re.IGNORECASE,
)
_TABLE_LINE = re.compile(
    r"""^[\s\[\](){}]*(?:[-+]?[\d.][\w.+-]*|[bru]?'[^']*'|[bru]?"[^"]*")(?:\s*[:,].*[,\])}]|,)\s*$"""
)
_HEX = re.compile(r"0x[0-9a-fA-F]+|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\b[0-9a-fA-F]{16,}\b")

_LEGAL = re.compile(
    r"copyright|\(c\) ?(?:19|20)\d\d|©|SPDX-|all rights reserved|licen[cs]ed? (?:under|to|for)|\blicen[cs]e\b|warranty"
    r"|without warrant|permission is hereby|redistribut",
    re.IGNORECASE,
)
_BYLINE = re.compile(
    r"^\W*(?:copyright\b.*(?:\d{4}|\(c\)|©).*|©.*|SPDX-.*|-\*- .*-\*-|(?:vim?|ex|code:?|coding)[:=] ?\S.*"
    r"|:?(?:copyright|licen[cs]e|authors?|maintainers?|contact|e-?mail|last modified|created(?: on| by)?|date"
    r"|revision|contributors?|modified by|written by|sectionauthor|moduleauthor|codeauthor)\s?::?(?:\s.*)?|@author\b.*"
    r"|:?\w+:? ?\$\w+(?::[^$]*)?\$"
    r"|all rights reserved.*|licensed under .*|(?:written|created|contributed) by [A-Z].*)$",
    re.IGNORECASE,
)
_COMMENT_BLOCK = re.compile(r"(?:^#[^\n]*\n)+", re.MULTILINE)
_OWNER = re.compile(
    r"copyright \(c\)|copyright \d|©|all rights reserved|permission is hereby|may not use this file", re.I
)
_DUNDER = re.compile(
    r"^__(?:author|authors|copyright|licen[cs]e|email|maintainer|credits|contact|date|revision|docformat)__\s*=\s*"
    r"(?:\((?:[^()]|\n)*?\)|\[[^\]]*\]|(?P<q>'''|\"\"\").*?(?P=q)|[^\n]*)\n",
    re.MULTILINE | re.DOTALL,
)
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]+@(?!example\b)[\w-]+(?:\.[\w-]+)*?\.(?:com|org|net|edu|gov|io|de|uk|fr|ch|jp|au|ca"
    r"|nl|eu|it|se|at|us|info|dev|me|cz|pl|ru|be|dk|no|fi|in|br|nz|za|es|co)\b"
)
_DOCSTRING = re.compile(
    r'\A(?P<before>(?:#[^\n]*\n|\n)*)(?P<open>[rRuU]?(?P<q>"""|\'\'\'))(?P<body>.*?)(?P=q)', re.DOTALL
)

_COMMON_WORDS = frozenset(
    "the of and to a in is that for it with as be this are by or on you if can not from at".split()  # noqa: SIM905
)
_STRIP = ".,;:!?()\"'`*"


def normalise(content: bytes) -> str | None:
    """Return the `tidy` text of a file; None if it is not UTF-8, or too short or long to count."""
    if not MIN_BYTES <= len(content) <= MAX_BYTES:
        return None
    return tidy(decode(content))


def decode(content: bytes) -> str | None:
    """Return UTF-8 text; None if it is none, or holds control characters."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or "\x1b" in text else text


def tidy(text: str | None) -> str | None:
    """Return `text` with plain line ends, no trailing blanks and at most two empty lines in a row."""
    if text is None:
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def why_drop(text: str, domain: str) -> str | None:
    """Return why the raw text of a file does not count in `domain`; None if it does."""
    if _SPECIAL.search(text):
        return "special tokens"
    if sum(map(len, re.findall(r"[^\x00-\x7f]+", text))) > _MAX_NON_ASCII[domain] * len(text):
        return "not ASCII"
    if max(map(len, text.split("\n"))) > _MAX_LINE and domain != "prose":
        return "long lines"
    if domain != "prose" and _SHARE_ALIKE.search(text[:_HEAD]):
        return "share-alike"
    if domain == "code" and _GENERATED.search(text[: _HEAD // 4]):
        return "generated"
    if is_table(text):
        return "table"
    if domain != "code" and common_words(text) < _MIN_COMMON_WORDS:
        return "not English sentences"
    return None


def is_table(text: str) -> bool:
    """Return whether `text` is mostly numbers, hexadecimal digits or rows of literals."""
    solid = len(re.sub(r"\s+", "", text)) or 1
    digits = sum(map(len, re.findall(r"\d+", text)))
    if digits + sum(map(len, _HEX.findall(text))) > _MAX_DIGITS * solid:
        return True
    lines = [line for line in text.split("\n") if line.strip()]
    return sum(bool(_TABLE_LINE.match(line)) for line in lines) > _MAX_TABLE_LINES * len(lines)


def common_words(text: str) -> float:
    """Return the share of words that any English sentence is full of."""
    words = [word.strip(_STRIP).lower() for word in text.split()]
    return sum(word in _COMMON_WORDS for word in words) / (len(words) or 1)


def clean_code(text: str) -> str:
    """Return Python source without its licence header, bylines and addresses."""
    text = _without_header(text)
    text = _DUNDER.sub("", text)
    text = _COMMENT_BLOCK.sub(lambda block: "" if _OWNER.search(block[0]) else block[0], text)
    if (docstring := _DOCSTRING.match(text)) is not None:
        text = _clean_docstring(docstring) + text[docstring.end() :]
    lines = [line for line in text.split("\n") if not (line.lstrip().startswith("#") and _BYLINE.match(line))]
    return mask_addresses("\n".join(lines)).strip("\n") + "\n"


def _without_header(text: str) -> str:
    """Drop the comments before the first statement that say who owns the file or how it is encoded.

    Comments there that say what the file does stay.
    """
    header, rest = _split_header(text)
    blocks = re.split(r"\n\s*\n", header)
    kept = [block for block in blocks if block.strip("#\n ") and not _LEGAL.search(block)]
    lines = [
        line
        for block in kept
        for line in [*block.split("\n"), ""]
        if not line.startswith("#!") and not _BYLINE.match(line)
    ]
    return ("\n".join(lines).strip("\n") + "\n\n" + rest).lstrip("\n")


def _split_header(text: str) -> tuple[str, str]:
    lines = text.split("\n")
    count = 0
    while count < len(lines) and (lines[count].startswith("#") or not lines[count].strip()):
        count += 1
    return "\n".join(lines[:count]), "\n".join(lines[count:])


def _clean_docstring(found: re.Match[str]) -> str:
    body = found["body"]
    paragraphs = [part for part in re.split(r"\n\s*\n", body) if not _LEGAL.search(part)]
    kept = "\n".join(line for line in "\n\n".join(paragraphs).split("\n") if not _BYLINE.match(line))
    if not kept.strip():
        return found["before"]
    if kept == body:
        return found[0]
    end = "\n" if "\n" in kept.strip() else ""
    return f"{found['before']}{found['open']}{kept.rstrip()}{end}{found['q']}"


def clean_docs(text: str) -> str:
    """Return reStructuredText or Markdown without comments about licences, bylines, badges and addresses."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # what a site generator reads
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(
        r"^\.\. (?![\w-]+(?::\w+)?::|_|\[|\|)[^\n]*\n(?:(?:[ \t]+[^\n]*)?\n(?=[ \t]|\n))*", "", text, flags=re.MULTILINE
    )
    text = re.sub(
        r"^\.\. (?:image|\|[^|\n]+\| image|raw)::[^\n]*\n(?:[ \t]+[^\n]*\n|\n(?=[ \t]))*", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"^\s*(?:\[?!\[[^\]]*\]\([^)]*\)(?:\]\([^)]*\))?\s*)+$", "", text, flags=re.MULTILINE)
    lines = [line for line in text.split("\n") if not _BYLINE.match(line)]
    return tidy(mask_addresses("\n".join(lines))) or ""


def mask_addresses(text: str) -> str:
    """Replace addresses of e-mail by one that is nobody's."""
    if "@" not in text:
        return text
    return _EMAIL.sub(lambda found: found[0] if found[0].startswith("git@") else "user@example.com", text)


_LIBRARY = re.compile(r"gutenberg|\A\s*Produced by ", re.IGNORECASE)
_GUTENBERG_START = re.compile(
    r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*?\*\*\*[^\n]*\n|\*END[* ]?THE SMALL PRINT[^\n]*\n"
)
_GUTENBERG_END = re.compile(
    r"\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|^End of (?:the )?Project Gutenberg", re.MULTILINE
)


def clean_prose(text: str) -> str:
    """Return prose without a library's boilerplate, each paragraph on one line.

    Verse and lists, whose lines are short, keep their lines.
    """
    if (start := _GUTENBERG_START.search(text)) is not None:
        text = text[start.end() :]
    if (end := _GUTENBERG_END.search(text)) is not None:
        text = text[: end.start()]
    paragraphs = re.split(r"\n\s*\n", text.strip("\n"))
    kept = [unwrap(part) for part in paragraphs if part.strip() and not _LIBRARY.search(part)]
    return mask_addresses("\n\n".join(kept)) + "\n"


def unwrap(paragraph: str) -> str:
    """Return a paragraph of hard-wrapped lines as one line; one of short lines as it is, without its common indent."""
    lines = [line.strip() for line in paragraph.split("\n") if line.strip()]
    full = [len(line) for line in lines[:-1]]
    if full and sum(length >= 50 for length in full) < 0.7 * len(full):
        return "\n".join(lines)
    return re.sub(r"  +", " ", " ".join(lines))


_PUNCTUATION = str.maketrans(
    {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: "--", 0x2013: "-", 0x2026: "...", 0xA0: " ", 0x60: "'"}
)


def plain_punctuation(text: str) -> str:
    """Return `text` with typewriter quotes and dashes, which is how most of the books here have them."""
    return text.translate(_PUNCTUATION)
