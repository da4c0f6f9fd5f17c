"""What the documents promise can be done: links lead somewhere, commands exist, the README's example runs."""

import re
import subprocess
import sys
from pathlib import Path

import import_rules
import pytest

ROOT = import_rules.ROOT
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_every_named_file_exists(path: Path) -> None:
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)]
    names = [
        ROOT / name for name in re.findall(r"`((?:gdn_jax|kernels|serving|tests|configs|scripts|docs)/[\w./-]+)`", text)
    ]
    assert [str(target) for target in (*links, *names) if not target.exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(path: Path) -> None:
    """Files by name or by path, and functions, of which the name's beginning may be given as `test_a_name...`."""
    files = {found.name for found in (ROOT / "tests").rglob("*.py")}
    functions = {
        name
        for found in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", found.read_text())
    }
    named = re.findall(r"`(?:tests/[\w/]*)?(\w+\.py)(?:::\w+)?`", path.read_text())
    missing = {name for name in named if name.startswith("test_") or name == "faults.py"} - files
    for name, cut in re.findall(r"\b(test_\w+)(?!\w*\.py)\b(\.\.\.)?", path.read_text()):
        if not any(function == name or (cut and function.startswith(name)) for function in functions):
            missing.add(name)
    assert missing == set()


def test_every_make_target_that_a_document_names_exists() -> None:
    named = {target for path in DOCUMENTS for target in re.findall(r"`?make ((?:[a-z]+-)?[a-z]+)`", path.read_text())}
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test", "check"} <= named <= known


def test_the_example_of_the_readme_prints_text(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(code.split("\n\n")[-1].splitlines()) <= 5
    code = code.replace("tests/golden", str(ROOT / "tests" / "golden"))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
