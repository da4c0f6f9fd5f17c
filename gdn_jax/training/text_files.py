"""Files of text: FOLDER/PART/DOMAIN[-N].jsonl.xz, PART train or held_out; one JSON object with `text` a line."""

import json
import lzma
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gdn_jax.training.errors import TrainingError

_NAME = re.compile(r"(?P<domain>[a-z][a-z0-9_]*)(-\d+)?\.jsonl\.xz")


def domain_of(path: Path) -> str | None:
    """Return the domain that a file belongs to by its name; None if it is no file of text."""
    match = _NAME.fullmatch(path.name)
    return match and match["domain"]


def domain_files(folders: Sequence[str | Path], part: str, domain: str) -> list[Path]:
    """Return the files of one domain and part, in the order of folders and names."""
    return [
        path
        for folder in folders
        for path in sorted((Path(folder) / part).glob("*.jsonl.xz"))
        if domain_of(path) == domain
    ]


def read_documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of one file: `text`, a string that can be encoded, and what else its line holds.

    Raises:
        TrainingError: the file is damaged, or a line is no such object.
    """
    number = 0
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1  # kept for the message
                document = json.loads(line)
                text = document["text"]
                if not isinstance(text, str):
                    raise TypeError(f"text is {text!r}")
                text.encode()  # half a surrogate pair is no text, and the tokenizer could not say where it stood
                yield document
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, lzma.LZMAError) as error:
        raise TrainingError(
            f"{path} must be xz with one JSON object with `text` per line; line {number}: {error!r}; write it again"
        ) from error
