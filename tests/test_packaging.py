"""The wheel holds the three folders as one package, and nothing else."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import import_rules
import pytest

ROOT = import_rules.ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources, so that no build folder is left among them."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=skip, dirs_exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_the_pico_model_and_no_other_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    modules = {
        f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
        for package, folder in import_rules.PACKAGES.items()
        for path in folder.rglob("*.py")
    }
    pico = {f"gdn_jax/models/pico/{path.name}" for path in (ROOT / "gdn_jax" / "models" / "pico").iterdir()}
    assert names == {*modules, *pico, "gdn_jax/py.typed"}


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist() if "dist-info" in name
        }
    assert "Apache License" in texts["licenses/LICENSE"]
    assert "gdn-jax = gdn_jax.serving.__main__:main" in texts["entry_points.txt"]


def test_every_dependency_is_bounded_and_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    reasons = {line.partition('"')[2].partition('"')[0] for line in text.splitlines() if "# " in line}
    unbounded = [line for line in wanted if ">=" not in line or ",<" not in line]
    assert unbounded == ["setuptools>=77"]
    assert [line for line in wanted if line not in reasons] == []
