"""What a model's name means: a path first, then what came with the package."""

import pytest

from gdn_jax import shipped
from gdn_jax.shipped import model_folder, shipped_models


@pytest.fixture
def in_the_package(tmp_path, monkeypatch):
    """Two folders in the package's place, one of which is a model."""
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "small" / "config.json").write_text("{}")
    (tmp_path / "models" / "empty").mkdir()
    monkeypatch.setattr(shipped, "_MODELS", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def test_a_name_means_the_models_folder_in_the_package(in_the_package):
    assert shipped_models() == ("small",)
    assert model_folder("small") == str(in_the_package / "small")


@pytest.mark.parametrize("name", ["", "empty", "other", "a/small", "x" * 5000, "../models/small"])
def test_anything_else_is_left_as_it_is(in_the_package, name):
    assert model_folder(name) == name


def test_a_path_of_that_name_goes_first(in_the_package, tmp_path):
    (tmp_path / "small").mkdir()
    assert model_folder("small") == "small"
