"""Make a little training text of this repository's own documents: python examples/tiny_text.py runs/tiny-text."""

import json
import lzma
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[1]
paragraphs = [
    paragraph
    for path in [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    for paragraph in path.read_text(encoding="utf-8").split("\n\n")
]
for part, chosen in (("held_out", paragraphs[::16]), ("train", [p for i, p in enumerate(paragraphs) if i % 16])):
    file = Path(sys.argv[1]) / part / "docs.jsonl.xz"
    file.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": paragraph}) + "\n" for paragraph in chosen)
