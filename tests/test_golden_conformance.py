"""The conformance script that lies beside the golden data, run on this project: nothing failed, nothing skipped."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from golden_adapter import Adapter

FOLDERS = ("tiny-next-dense", "tiny-next-moe", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8")


@pytest.fixture(scope="module")
def script(golden_folder: Path) -> ModuleType:
    """Load the script as it is."""
    path = golden_folder.parent / "tools" / "check_golden.py"
    spec = importlib.util.spec_from_file_location("check_golden", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FOLDERS)
def test_a_golden_checkpoint_gives_every_expected_value(script, golden_folder, name, capsys):
    report = script.Report()
    script.model(report, Adapter, golden_folder / name)
    print_out = capsys.readouterr().out
    assert report.n["failed"] == report.n["skipped"] == 0, print_out
    assert report.n["passed"] > 20, "the script compared nearly nothing"


def test_the_golden_kernel_cases_give_every_expected_value(script, golden_folder, capsys):
    report = script.Report()
    script.kernels(report, Adapter, golden_folder / "kernels.safetensors")
    print_out = capsys.readouterr().out
    assert report.n["failed"] == report.n["skipped"] == 0, print_out
    assert report.n["passed"] > 40, "the script compared nearly nothing"


def test_every_folder_of_the_golden_data_is_covered(golden_folder):
    assert sorted(path.name for path in golden_folder.iterdir() if path.is_dir()) == sorted(FOLDERS)
