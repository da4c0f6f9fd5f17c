"""Text is gathered clean, once, in pieces, and the same each time; the list of sources keeps its rules."""

import gzip
import io
import json
import lzma
import struct
import subprocess
import tarfile
import zlib
from hashlib import sha256, shake_256
from pathlib import Path

import pytest
from import_rules import ROOT

from scripts.gather_text import __main__ as command
from scripts.gather_text import books, clean, download, wordnet
from scripts.gather_text.archives import members
from scripts.gather_text.dedupe import SeenLines
from scripts.gather_text.download import DownloadError, fetch
from scripts.gather_text.gather import Document, clean_texts, documents
from scripts.gather_text.sources import ALLOWED_LICENCES, DOMAINS, Source, SourceList, licences_of, load_sources
from scripts.gather_text.split import pieces
from scripts.gather_text.write import write_documents, write_shards

LIST = ROOT / "configs" / "train" / "sources.toml"


# ---- the list ----


def test_every_listed_source_is_complete_and_its_licence_allowed() -> None:
    listed = load_sources(LIST)  # which checks each entry
    assert len(listed.sources) > 100
    assert {domain for source in listed.sources for domain in source.domains} == set(DOMAINS)
    assert set(listed.caps) == set(DOMAINS)
    for source in listed.sources:
        assert licences_of(source.licence) <= ALLOWED_LICENCES
        assert not {"GPL-2.0-only", "GPL-3.0-or-later", "MPL-2.0", "CC-BY-SA-4.0"} & licences_of(source.licence)
        # ":" cannot stand in a file name that apt-get writes
        assert source.version.replace(":", "%3a") in source.archive
        assert source.notice or "WordNet" not in source.licence


def test_every_domain_has_text_to_train_on_and_text_that_is_held_out() -> None:
    listed = load_sources(LIST)
    for domain in DOMAINS:
        sources = [source for source in listed.sources if domain in source.domains]
        assert any(not source.held_out for source in sources)
        assert any(source.held_out or source.held_out_share for source in sources)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"licence": "GPL-3.0-or-later"}, "GPL-3.0-or-later is not among those allowed"),
        ({"licence": "MIT AND MPL-2.0"}, "MPL-2.0 is not among"),
        ({"sha256": "12ab"}, "64 hexadecimal digits"),
        ({"registry": "elsewhere"}, "must be pypi or debian"),
        ({"domains": ("poems",)}, "domains must be among"),
        ({"held_out_share": 1.5}, "below 1"),
    ],
)
def test_a_source_that_breaks_a_rule_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"'made-up'.*{message}"):
        source(**change)


def test_of_alternative_licences_an_allowed_one_is_enough() -> None:
    assert licences_of("Apache-2.0 OR GPL-2.0-or-later") == {"Apache-2.0"}
    assert licences_of("MIT AND (GPL-2.0-only OR LGPL-3.0-only)") == {"MIT", "GPL-2.0-only", "LGPL-3.0-only"}


@pytest.mark.parametrize("line", ['licence = "MIT"', 'flavour = "sweet"'])
def test_an_entry_that_lacks_a_key_or_has_one_too_many_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(f'never = {{ files = [] }}\npaths = {{}}\ncaps = {{}}\n[[source]]\nname = "made-up"\n{line}\n')
    with pytest.raises(ValueError, match=r"made-up.*(lacks|unknown)"):
        load_sources(path)


# ---- cleaning ----

HEADED = '''#!/usr/bin/env python
# -*- coding: utf-8 -*-
# Copyright (c) 2019 Some Body <some.body@company.com>
# Licensed under the MIT licence.

# SPDX-License-Identifier: MIT

# Numbers are added here, two at a time.
"""Add numbers.

:copyright: (c) 2019 by Some Body.
:license: MIT, see LICENSE for details.

Only two at a time.
"""

__author__ = "Some Body"
__all__ = ["add"]
__authors__ = [
    "Some Body",
]
# Copyright (c) 2018 Another Body
# You may not use this file except in compliance with it.


def add(a, b):
    # Author: Some Body
    # Ask some.body@company.com, or see git@github.com:x/y.
    return a @ b.T + 1
'''


def test_a_licence_header_goes_and_what_the_file_does_stays() -> None:
    assert clean.clean_code(HEADED) == (
        "# Numbers are added here, two at a time.\n\n"
        '"""Add numbers.\n\nOnly two at a time.\n"""\n\n'
        '__all__ = ["add"]\n\n\n'
        "def add(a, b):\n"
        "    # Ask user@example.com, or see git@github.com:x/y.\n"
        "    return a @ b.T + 1\n"
    )


def test_code_with_nothing_to_hide_is_left_as_it_is() -> None:
    code = '"""One line."""\n\n# A remark.\nimport os\n\n\ndef f():\n    """Do."""\n    return os\n'
    assert clean.clean_code(code) == code
    assert clean.clean_code("import os\n") == "import os\n"


def test_documentation_loses_comments_and_badges_and_keeps_directives() -> None:
    text = (
        "---\ntitle: x\n---\n<!-- Copyright of somebody -->\n.. a comment\n   of two lines\n\n"
        ".. _target:\n\nTitle\n=====\n\n"
        ":author: Some Body\n\n[![badge](a.svg)](b)\n\n.. note::\n\n   Kept.\n\n"
        ".. image:: x.png\n   :width: 3\n\nThe end.\n"
    )
    cleaned = clean.clean_docs(text)
    assert "Kept." in cleaned
    assert ".. note::" in cleaned
    assert ".. _target:" in cleaned
    for gone in ("Copyright", "comment", "two lines", "badge", "Some Body", "image", "title: x"):
        assert gone not in cleaned


@pytest.mark.parametrize(
    ("text", "domain", "reason"),
    [
        ("x = '<|im_start|>'\n", "code", "special tokens"),
        ("The model may then say <think> and go on.\n", "docs", "special tokens"),
        ("Это не английский текст, хотя и он написан для людей.\n", "docs", "not ASCII"),
        ("x = 1  # " + "y" * 500 + "\n", "code", "long lines"),
        ("# This file is auto-generated. Do not edit.\nx = f(y)\n", "code", "generated"),
        ("# GNU General Public License, version 3\nx = f(y)\n", "code", "share-alike"),
        ("T = [\n" + "    1.5, 2.5, 3.5,\n" * 40 + "]\n", "code", "table"),
        ("T = [\n" + "    'word',\n" * 40 + "]\n", "code", "table"),
        ("Der Hund lief durch den Wald und fand eine Katze auf dem Baum.\n", "docs", "not English sentences"),
        ("def f(x):\n    return x\n", "code", None),
        ("The dog ran to the wood and it found a cat on a tree.\n", "docs", None),
    ],
)
def test_a_file_is_dropped_for_a_reason(text: str, domain: str, reason: str | None) -> None:
    assert clean.why_drop(text, domain) == reason


@pytest.mark.parametrize("content", [b"short", b"x" * 200_001, b"\xff\xfe" * 200, b"\0" * 300])
def test_a_file_too_short_or_long_or_binary_is_no_text(content: bytes) -> None:
    assert clean.normalise(content) is None


def test_line_ends_and_blanks_are_plain() -> None:
    raw = ("\ufeffa  \r\nb\t\r\n" + "\r\n" * 9 + "c" * 200).encode()
    assert clean.normalise(raw) == "a\nb\n\n\n" + "c" * 200 + "\n"


def test_wrapped_prose_becomes_paragraphs_and_verse_keeps_its_lines() -> None:
    text = (
        "Licence of a library\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\n"
        "It was a long day, and nobody in the whole house knew what\nto do with "
        "so much of a day, so that they all went\nto bed.\n\n"
        "  Roses are red,\n  violets are blue,\n  and so on.\n\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nMore licence\n"
    )
    assert clean.clean_prose(text) == (
        "It was a long day, and nobody in the whole house knew what to do with so much of a day, "
        "so that they all went to bed.\n\n"
        "Roses are red,\nviolets are blue,\nand so on.\n"
    )


# ---- pieces ----


@pytest.mark.parametrize("domain", ["code", "docs", "prose"])
def test_pieces_fit_and_lose_nothing(domain: str) -> None:
    block = (
        "def name(value):\n    first = value\n\n    return first\n\n\n# Heading of it\n\nSome words. More words.\n\n"
    )
    text = block * 40
    cut = pieces(text, domain, limit=600)
    assert len(cut) > 5
    assert all(len(piece) <= 601 for piece in cut)
    assert "".join("".join(cut).split()) == "".join(text.split())


def test_code_is_cut_between_definitions() -> None:
    text = "".join(f"@wrap\ndef f{i}():\n    a = {i}\n\n    return {'a' * 80}\n\n\n" for i in range(9))
    assert all(piece.startswith("@wrap\ndef f") for piece in pieces(text, "code", limit=300))


def test_a_long_class_is_cut_between_methods_and_a_long_line_anywhere() -> None:
    text = "class C:\n" + "".join(f"    def f{i}(self):\n        return {'a' * 150}\n\n" for i in range(9))
    first, *others = pieces(text, "code", limit=400)
    assert first.startswith("class C")
    assert all(piece.startswith("    def f") for piece in others)
    assert [len(piece) for piece in pieces("x" * 1000, "code", limit=400)] == [401, 401, 201]


def test_documentation_is_cut_at_headings() -> None:
    text = "".join(f"Part {i}\n======\n\n{'Words and words. ' * 10}\n\n{'More of them. ' * 5}\n\n" for i in range(9))
    assert all(piece.startswith("Part ") for piece in pieces(text, "docs", limit=600))


# ---- nothing twice ----


def test_a_copy_and_a_near_copy_are_no_news() -> None:
    seen = SeenLines()
    lines = [f"this is line number {i} of the text" for i in range(10)]
    assert seen.add("\n".join(lines))
    assert not seen.add("\n".join(lines) + "\n\n")
    assert not seen.add("\n".join(lines[:6] + [f"some other line, the {i}th of them" for i in range(4)]))
    assert seen.add("\n".join(lines[:4] + [f"an entirely new line with number {i}" for i in range(6)]))


def test_short_texts_are_compared_whole() -> None:
    seen = SeenLines()
    assert seen.add("a = 1\n")
    assert seen.add("a = 2\n")
    assert not seen.add("a = 1\n")


# ---- archives, books, glosses ----


def tar_of(files: dict[str, str], path: Path, top: str = "made-up-1.0/") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def anything(path: str) -> bool:
    return True


def test_the_files_of_a_source_archive_and_of_a_debian_package_are_found(tmp_path: Path) -> None:
    files = {"a.py": "x = 1\n", "docs/b.rst": "Words\n"}
    expected = [("a.py", b"x = 1\n"), ("docs/b.rst", b"Words\n")]
    assert list(members(tar_of(files, tmp_path / "made-up-1.0.tar.gz"), anything)) == expected
    assert list(members(tmp_path / "made-up-1.0.tar.gz", lambda path: path == "a.py")) == expected[:1]

    data = tar_of(files, tmp_path / "data.tar.gz", top="./").read_bytes()
    parts = {"debian-binary": b"2.0", "control.tar.xz": b"odd", "data.tar.gz": data}
    deb = b"!<arch>\n"
    for name, content in parts.items():
        deb += (
            f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )
    (tmp_path / "made-up_1.0_all.deb").write_bytes(deb)
    assert list(members(tmp_path / "made-up_1.0_all.deb", anything)) == expected

    with pytest.raises(ValueError, match=r"notes\.odt is neither"):
        list(members(tmp_path / "notes.odt", anything))


def r_strings(lines: list[str]) -> bytes:
    header = struct.pack(">2s4i5s", b"X\n", 3, 4, 5, 5, b"UTF-8")
    strings = b"".join(struct.pack(">2i", 0x00040009, len(line)) + line.encode() for line in lines)
    return header + struct.pack(">2i", 16, len(lines)) + strings


def test_novels_are_read_from_r_data() -> None:
    stored = [zlib.compress(r_strings(lines)) for lines in (["", "MY NOVEL", "It began."], ["Other", "It ended."])]
    database = b"".join(struct.pack(">I", 1) + block for block in stored)
    assert list(books.texts("data/Rdata.rdb", database)) == [
        ("data/Rdata.rdb/my-novel", "\nMY NOVEL\nIt began."),
        ("data/Rdata.rdb/other", "Other\nIt ended."),
    ]


def test_a_module_of_scripture_becomes_paragraphs_without_notes() -> None:
    markup = (
        '<title>One</title><chapter n="1"/>In <w a="b">the</w> beginning'
        '<note n="1">Or start</note>, &amp;c.<div sID="2"/>End.'
    )
    (found,) = books.texts("m/ot.bzz", zlib.compress(markup.encode()))
    assert found == ("m/ot.bzz/0", "One\n\nIn the beginning , &c.\n\nEnd.")


def test_packed_text_is_unpacked_and_what_is_no_text_is_left_out() -> None:
    assert list(books.texts("a.txt.gz", gzip.compress(b"Words"))) == [("a.txt.gz", "Words")]
    assert list(books.texts("a.txt", b"\xff\xff")) == []


GLOSS = (
    "00000001 04 n 01 act 0 000 | something done\n"
    '00000002 04 n 02 follow-through 0 carrying_out(a) 0 001 @ 00000001 n 0000 | doing it to the end; "he liked his '
    'follow-through"; "so did she"\n'
)


def test_a_meaning_is_read_from_its_line() -> None:
    meaning = wordnet.parse(GLOSS.splitlines()[1])
    assert meaning.words == ("follow-through", "carrying out")
    assert meaning.definition == "doing it to the end"
    assert meaning.examples == ("he liked his follow-through", "so did she")
    assert meaning.kind_of == "00000001"


def test_each_meaning_gives_a_line_in_a_form_that_varies() -> None:
    (document,) = wordnet.documents("  1 a licence\n" + GLOSS)
    first, second = document.splitlines()
    assert "something done" in first
    assert "doing it to the end" in second
    assert "licence" not in document
    meaning = wordnet.parse(GLOSS.splitlines()[1])
    forms = {wordnet.sentence(wordnet.parse(f"{i:08}{GLOSS.splitlines()[1][8:]}"), "act")[:8] for i in range(40)}
    assert len(forms) == 4
    assert wordnet.sentence(meaning, "act") == wordnet.sentence(meaning, "act")


# ---- the whole ----


def source(**changes: object) -> Source:
    facts: dict[str, object] = {
        "registry": "pypi",
        "name": "made-up",
        "version": "1.0",
        "archive": "made-up-1.0.tar.gz",
        "sha256": "0" * 64,
        "licence": "MIT",
        "domains": ("code",),
    }
    return Source(**(facts | changes))  # type: ignore[arg-type]


def source_list(*sources: Source, cap: int = 100_000) -> SourceList:
    caps = dict.fromkeys(DOMAINS, cap)
    return SourceList(paths={"code": ("*.py",), "docs": ("*.rst",)}, never=("*/_vendor/*",), caps=caps, sources=sources)


def name(number: int) -> str:
    return f"name_{'abcdefghijklmnopqrst'[number % 20]}{'xy'[number // 20]}"


def function(name: str) -> str:
    rest = "".join(f"    {letter}_of_{name} = call_{name}({letter}, other_{name})\n" for letter in "abcdefghij")
    return f"def {name}():\n{rest}"


def gathered(files: dict[str, str], folder: Path, cap: int = 100_000, **changes: object) -> list[Document]:
    one = source(**changes)
    found = clean_texts(one, source_list(one, cap=cap), tar_of(files, folder / one.archive))
    return list(documents(one, found, SeenLines()))


def test_files_are_taken_by_domain_and_vendored_ones_are_not(tmp_path: Path) -> None:
    files = {
        "a.py": function("one"),
        "pkg/_vendor/b.py": function("two"),
        "docs/c.rst": "It is the way of the world that one has to read a lot of words. " * 6,
        "bad.py": function("three") + "this is no Python\n",
        "copy.py": function("one") + "\n",
    }
    found = gathered(files, tmp_path, domains=("code", "docs"))
    assert sorted((doc.domain, doc.text.split()[0], doc.source) for doc in found) == [
        ("code", "def", "made-up 1.0"),
        ("docs", "It", "made-up 1.0"),
    ]


def test_a_cap_limits_a_package_and_tests_come_last_and_in_part(tmp_path: Path) -> None:
    code = {f"pkg/m{i}.py": function(name(i)) for i in range(20)}
    tests = {f"tests/test_{i}.py": function(f"check_{name(i)}") for i in range(20)}
    size = len(code["pkg/m0.py"])
    few = gathered(code | tests, tmp_path, cap=5 * size + 100)
    assert all("def name" in doc.text for doc in few)
    assert 4 <= len(few) <= 5
    every = [doc.text for doc in gathered(code | tests, tmp_path)]
    assert sum("def name" in text for text in every) == 20
    assert 1 <= sum("def check" in text for text in every) <= 3


def test_a_held_out_package_and_a_share_of_documents_are_kept_from_training(tmp_path: Path) -> None:
    files = {f"m{i}.py": function(name(i)) for i in range(40)}
    assert all(doc.held_out for doc in gathered(files, tmp_path, held_out=True))
    kept = [doc.held_out for doc in gathered(files, tmp_path, held_out_share=0.3)]
    assert 0 < sum(kept) < len(kept) / 2
    assert kept == [doc.held_out for doc in gathered(files, tmp_path, held_out_share=0.3)]


def read_shards(folder: Path, pattern: str) -> list[dict[str, str]]:
    texts = [lzma.decompress(path.read_bytes()).decode() for path in sorted(folder.glob(pattern))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_documents_are_written_shuffled_and_the_same_each_time(tmp_path: Path) -> None:
    made = [Document(text=f"text {i}\n", source="made-up 1.0", domain="docs", held_out=i % 5 == 0) for i in range(50)]
    first, second = tmp_path / "first", tmp_path / "second"
    sizes = write_documents(made, first)
    assert write_documents(made, second) == sizes
    path = Path("train/docs.jsonl.xz")
    assert (first / path).read_bytes() == (second / path).read_bytes()
    found = [line["text"] for line in read_shards(first / "train", "docs.jsonl.xz")]
    assert found != sorted(found, key=lambda text: int(text.split()[1]))
    assert len(found) == 40
    assert len(read_shards(first / "held_out", "docs.jsonl.xz")) == 10
    assert not list(first.rglob("code*"))
    assert sizes["train/docs"] == (first / path).stat().st_size


def test_a_domain_too_big_for_one_file_is_written_in_several(tmp_path: Path) -> None:
    def digits(number: int) -> str:  # 2,000 characters that hardly compress
        return shake_256(str(number).encode()).hexdigest(1000)

    made = [Document(text=digits(i), source="made-up 1.0", domain="code", held_out=False) for i in range(300)]
    size = write_shards(made, tmp_path, "code", max_bytes=200_000, margin=80_000)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"code-{i}.jsonl.xz" for i in range(len(paths))]
    assert len(paths) > 1
    assert all(path.stat().st_size <= 200_000 for path in paths)
    assert sum(path.stat().st_size for path in paths) == size
    assert [line["text"] for line in read_shards(tmp_path, "code-*")] == [doc.text for doc in made]
    write_shards(made[:2], tmp_path, "code")
    assert [path.name for path in tmp_path.iterdir()] == ["code.jsonl.xz"]


def test_an_archive_is_taken_from_the_cache_if_its_checksum_is_right(tmp_path: Path) -> None:
    kept = tar_of({"a.py": function("one")}, tmp_path / "made-up-1.0.tar.gz")
    digest = sha256(kept.read_bytes()).hexdigest()
    assert fetch(source(sha256=digest), tmp_path) == kept
    with pytest.raises(DownloadError, match=f"made-up 1.0: the archive has sha256 {digest}.*removed"):
        fetch(source(), tmp_path)
    assert not kept.exists()


@pytest.mark.parametrize(
    ("registry", "client", "remedy"), [("pypi", "pip", "--skip-missing"), ("debian", "apt-get", "point release")]
)
def test_a_failed_download_names_the_package_and_what_to_do(
    registry: str, client: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert client in command
        return subprocess.CompletedProcess(command, 1, "", "first\nno such version\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(DownloadError, match=rf"made-up 1\.0 cannot be downloaded: no such version\. .*{remedy}"):
        fetch(source(registry=registry), tmp_path)


LISTED = """
[paths]
code = ["*.py"]
[caps]
code = 100_000
[never]
files = []
[[source]]
registry = "pypi"
name = "made-up"
version = "1.0"
archive = "made-up-1.0.tar.gz"
sha256 = "{digest}"
licence = "MIT"
domains = ["code"]
[[source]]
registry = "debian"
name = "not-there"
version = "2"
archive = "not-there_2_all.deb"
sha256 = "{digest}"
licence = "MIT"
domains = ["code"]
"""


def test_the_command_gathers_and_accounts_for_it_and_skips_what_is_missing_only_if_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tar_of({f"m{i}.py": function(name(i)) for i in range(3)}, tmp_path / "made-up-1.0.tar.gz")
    digest = sha256(kept.read_bytes()).hexdigest()
    (tmp_path / "sources.toml").write_text(LISTED.format(digest=digest))
    monkeypatch.setattr(download, "_apt", lambda _: ["false"])
    options = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path), "--sources", str(tmp_path / "sources.toml")]
    assert command.main(options) == 1
    assert "not-there 2 cannot be downloaded" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())

    assert command.main([*options, "--skip-missing"]) == 0
    account = json.loads((tmp_path / "out" / "sources.json").read_text())
    (row,) = account["sources"]
    assert (row["name"], row["licence"], row["domain"], row["split"]) == ("made-up", "MIT", "code", "train")
    assert row["documents"] == 3
    texts = [line["text"] for line in read_shards(tmp_path / "out" / "train", "code.jsonl.xz")]
    assert row["characters"] == sum(map(len, texts))
    (code,) = [entry for entry in account["sums"] if (entry["domain"], entry["split"]) == ("code", "train")]
    assert code["characters"] == row["characters"]
    assert "train/code" in capsys.readouterr().out


def test_what_cannot_be_written_is_refused_before_anything_is_downloaded(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "_download", lambda *arguments, **named: pytest.fail("downloaded"))
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--out", str(tmp_path / "file")], "--out must be a folder"),
        (["--out", str(tmp_path), "--jobs", "0"], "--jobs must be at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert message in capsys.readouterr().err
