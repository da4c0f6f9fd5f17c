"""Count what a text to train on is made of, and under which licences it stands.

    python -m scripts.count_sources --text FOLDER [FOLDER ...] --out sources.json

Reads the folders that `scripts.gather_text` and `scripts/generate_dialogues.py` wrote, and the list of sources. One row
per source, domain and part (train or held_out), sums per domain and part, and the notices that licences ask for. It
counts what is there: text that was gathered with another list than today's has its own numbers.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gdn_jax.training.text_files import domain_of, read_documents
from scripts.gather_text.sources import SOURCES, Source, load_sources

# Documents of scripts/generate_dialogues.py say so; they are the project's own.
_GENERATED = {"registry": "gdn-jax", "name": "scripts/generate_dialogues.py", "version": "", "licence": "Apache-2.0"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the account; return the exit status."""
    options = _parse(arguments)
    account = count_sources(options.text, load_sources(options.sources).sources)
    options.out.write_text(_rendered(account), encoding="utf-8")
    return 0


def count_sources(folders: Sequence[Path], sources: Sequence[Source]) -> dict[str, list[dict[str, object]]]:
    """Return rows per source, sums per domain and notices; characters are those of the texts, not of the files.

    Raises:
        ValueError: If a document's source is not in the list, or the folders hold no text.
    """
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for split, domain, label, characters in _documents(folders):
        counts.setdefault((split, domain, label), Counter()).update(documents=1, characters=characters)
    if not counts:
        raise ValueError(f"no train/*.jsonl.xz and no held_out/*.jsonl.xz in {', '.join(map(str, folders))}")
    listed = {source.label: source for source in sources}
    rows, sums = [], {}
    for (split, domain, label), count in sorted(counts.items(), key=lambda item: item[0][::-1]):
        rows.append({**_facts(label, listed), "domain": domain, "split": split, **count})
        sums.setdefault((split, domain), Counter()).update(count)
    labels = sorted({label for _, _, label in counts} & listed.keys())
    return {
        "sums": [{"split": split, "domain": domain, **count} for (split, domain), count in sorted(sums.items())],
        "notices": [{"source": label, "notice": listed[label].notice} for label in labels if listed[label].notice],
        "sources": rows,
    }


def _documents(folders: Sequence[Path]) -> Iterator[tuple[str, str, str, int]]:
    """Yield part, domain, source and characters of each document."""
    for folder in folders:
        for path in sorted(folder.glob("*/*.jsonl.xz")):
            for document in read_documents(path):
                yield path.parent.name, domain_of(path) or path.name, document["source"], len(document["text"])


def _facts(label: str, listed: dict[str, Source]) -> dict[str, str]:
    if label == "generated":
        return _GENERATED
    if label not in listed:
        raise ValueError(f"source {label!r} is not in the list: give the list that the text was gathered with")
    source = listed[label]
    return {key: getattr(source, key) for key in ("registry", "name", "version", "licence")}


def _rendered(account: dict[str, list[dict[str, object]]]) -> str:
    """Return JSON with one row per line."""
    parts = []
    for name, rows in account.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.count_sources", description="Count sources of a text.")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders with train/ and held_out/")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="the list of packages")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
