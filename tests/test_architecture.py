"""The import directions of docs/architecture.md hold, and what must load without JAX does."""

import subprocess
import sys
from pathlib import Path

import import_rules
import pytest
from import_rules import Tree

# Put before an import, it stands in for a machine on which the named packages are not installed.
WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is made unimportable")
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def tree() -> Tree:
    return import_rules.read_tree()


def small_tree(tree: Tree, **modules: str) -> Tree:
    """Return a tree of a few empty modules, the lazy table of the real one, and the given modules."""
    empty = [
        "gdn_jax.state",
        "gdn_jax.kernels.anchors",
        "gdn_jax.serving.core.scheduler",
        "gdn_jax.serving.core.errors",
        "gdn_jax.serving.runner.steps",
    ]
    return Tree(sources={**dict.fromkeys(empty, ""), **modules}, lazy=tree.lazy)


def run_python(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter, away from the sources; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_only_what_its_row_allows(tree: Tree) -> None:
    assert import_rules.breaches(tree) == []


def test_no_import_goes_round_in_a_circle(tree: Tree) -> None:
    assert import_rules.cycle(tree) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("kernels.bad", "from gdn_jax.state import KVPages"),
        ("kernels.bad", "from gdn_jax import __version__"),
        ("kernels.bad", "from flax import nnx"),
        ("bad", "from gdn_jax.serving.core import errors"),
        ("bad", "from gdn_jax import SamplingParams"),
        ("bad", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gdn_jax.serving.llm"),
        ("bad", "import torch"),
        ("bad", "from kernels import anchors"),
        ("bad", "from .state import KVPages"),
        ("bad", "def late():\n    import numpy as np  # numpy"),
        ("bad", "def late():\n    from gdn_jax import state  # gdn_jax"),
        ("training.dialogues.bad", "from gdn_jax.serving.text import tokenizer"),
        ("training.dialogues.bad", "import numpy as np"),
        ("serving.core.bad", "import numpy as np"),
        ("serving.core.bad", "import time"),
        ("serving.core.bad", "from gdn_jax.serving.text import tokenizer"),
        ("serving.core.bad", "from gdn_jax.config import ModelConfig"),
        ("serving.text.bad", "import jax.numpy as jnp"),
        ("serving.text.bad", "from gdn_jax.serving.core.scheduler import Scheduler"),
        ("serving.runner.bad", "from gdn_jax.serving.core.scheduler import Scheduler"),
        ("serving.runner.bad", "from gdn_jax.serving.core import scheduler"),
        ("serving.http.bad", "from gdn_jax.serving.runner import steps"),
        ("serving.newcomer", "import math"),
    ],
)
def test_a_forbidden_import_is_caught(tree: Tree, module: str, code: str) -> None:
    caught = import_rules.breaches(small_tree(tree, **{f"gdn_jax.{module}": code}))
    assert len(caught) == 1
    assert caught[0].startswith(f"gdn_jax.{module}")


def test_an_optional_dependency_may_be_imported_late_where_a_comment_names_it(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(import_rules.RULES, "model", import_rules.Rule(others=frozenset({"optax"})))
    silent = small_tree(tree, **{"gdn_jax.training": "def late():\n    import optax"})
    spoken = small_tree(tree, **{"gdn_jax.training": "def late():\n    # needs optax, extra `train`\n    import optax"})
    assert len(import_rules.breaches(silent)) == 1
    assert import_rules.breaches(spoken) == []


def test_a_circle_of_imports_is_caught(tree: Tree) -> None:
    first, second = "from gdn_jax import second", "from gdn_jax.first import thing"
    looped = small_tree(tree, **{"gdn_jax.first": first, "gdn_jax.second": second})
    assert set(import_rules.cycle(looped)) == {"gdn_jax.first", "gdn_jax.second"}


def test_jit_stands_where_the_decision_record_lists_it_and_nowhere_else(tree: Tree) -> None:
    assert import_rules.jits(tree) == import_rules.JITTED


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("import jax\n@jax.jit\ndef f(x): return x", "f"),
        ("import jax\nfrom functools import partial\n@partial(jax.jit, static_argnums=0)\ndef f(x): return x", "f"),
        ("import jax\nf = jax.jit(abs)", "line 2"),
        ("import jax\ndef f(x):\n    return jax.jit(abs)(x)", "line 3"),
        ("from flax import nnx\nclass A:\n    @nnx.jit\n    def f(self): pass", "line 3"),
        ("from jax import jit as compiled", "line 1"),
    ],
)
def test_a_jit_anywhere_is_found(tree: Tree, code: str, place: str) -> None:
    assert import_rules.jits(small_tree(tree, **{"gdn_jax.serving.runner.bad": code})) == {
        "serving.runner.bad": {place}
    }


def test_importing_the_package_loads_no_array_library(tmp_path: Path) -> None:
    code = "import sys, gdn_jax; print({'jax', 'jaxlib', 'flax', 'numpy'} & set(sys.modules))"
    assert run_python(code, tmp_path) == "set()\n"


@pytest.mark.parametrize(
    ("part", "blocked"),
    [
        ("gdn_jax.serving.core", {"jax", "jaxlib", "flax", "numpy", "tokenizers", "jinja2", "msgspec"}),
        ("gdn_jax.serving.text", {"jax", "jaxlib", "flax"}),
    ],
)
def test_the_part_loads_on_a_machine_without_jax(tree: Tree, tmp_path: Path, part: str, blocked: set[str]) -> None:
    modules = [name for name in tree.sources if name.startswith(part)]
    code = (
        WITHOUT.format(blocked=blocked) + "\n".join(f"import {name}" for name in modules) + f"\nprint({len(modules)})"
    )
    assert run_python(code, tmp_path) == f"{len(modules)}\n"
    with pytest.raises(AssertionError, match="made unimportable"):
        run_python(WITHOUT.format(blocked=blocked) + "import jax", tmp_path)
