"""The account of a text counts what is in its files, and knows the licence of all of it."""

import json
import lzma
from pathlib import Path

import pytest

from scripts import count_sources

LIST = """
[paths]
[caps]
[never]
files = []
"""
ENTRY = """
[[source]]
registry = "{registry}"
name = "{name}"
version = "1.0"
archive = "{name}-1.0.tar.gz"
sha256 = "{digit:064}"
licence = "{licence}"
domains = ["code", "glosses"]
notice = "{notice}"
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    one = ENTRY.format(registry="pypi", name="one", digit=1, licence="MIT", notice="")
    two = ENTRY.format(registry="debian", name="two", digit=2, licence="LicenseRef-WordNet-3.0", notice="Told.")
    (tmp_path / "sources.toml").write_text(LIST + one + two)
    paths = ["--sources", str(tmp_path / "sources.toml"), "--out", str(tmp_path / "sources.json")]
    return ["--text", str(tmp_path / "text"), str(tmp_path / "dialogues"), *paths]


def write(path: Path, *documents: tuple[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "source": source}) + "\n" for text, source in documents)


def test_shards_splits_and_sources_are_counted_apart(tmp_path: Path, arguments: list[str]) -> None:
    write(tmp_path / "text" / "train" / "code-0.jsonl.xz", ("ab", "one 1.0"), ("é", "two 1.0"))
    write(tmp_path / "text" / "train" / "code-1.jsonl.xz", ("abc", "one 1.0"))
    write(tmp_path / "text" / "held_out" / "glosses.jsonl.xz", ("abcd", "two 1.0"))
    write(tmp_path / "dialogues" / "train" / "chat.jsonl.xz", ("abcde", "generated"))
    assert count_sources.main(arguments) == 0
    account = json.loads((tmp_path / "sources.json").read_text())
    sums = [tuple(row.values()) for row in account["sums"]]
    assert sums == [("held_out", "glosses", 1, 4), ("train", "chat", 1, 5), ("train", "code", 3, 6)]
    assert [tuple(row.values()) for row in account["sources"]] == [
        ("gdn-jax", "scripts/generate_dialogues.py", "", "Apache-2.0", "chat", "train", 1, 5),
        ("pypi", "one", "1.0", "MIT", "code", "train", 2, 5),
        ("debian", "two", "1.0", "LicenseRef-WordNet-3.0", "code", "train", 1, 1),
        ("debian", "two", "1.0", "LicenseRef-WordNet-3.0", "glosses", "held_out", 1, 4),
    ]
    assert account["notices"] == [{"source": "two 1.0", "notice": "Told."}]


def test_a_source_that_is_not_listed_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    write(tmp_path / "text" / "train" / "code.jsonl.xz", ("ab", "one 2.0"))
    with pytest.raises(ValueError, match=r"'one 2\.0' is not in the list"):
        count_sources.main(arguments)


def test_folders_without_text_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no train/\*\.jsonl\.xz"):
        count_sources.main(arguments)
