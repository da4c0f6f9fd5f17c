"""The error tree: who catches what."""

import ast
import pickle
import re
import sys
from pathlib import Path

import import_rules
import pytest

from gdn_jax.serving.core import errors
from gdn_jax.serving.core.errors import (
    DeviceError,
    EngineError,
    InvalidParameterError,
    InvalidPromptError,
    InvariantError,
    PromptTooLongError,
    RequestError,
    StartupError,
    UnsupportedParameterError,
)

REQUEST_ERRORS = [InvalidParameterError, InvalidPromptError, PromptTooLongError, UnsupportedParameterError]


@pytest.mark.parametrize("kind", REQUEST_ERRORS)
def test_every_refusal_of_a_request_is_caught_as_request_error_and_as_value_error(kind: type[RequestError]) -> None:
    assert issubclass(kind, RequestError)
    assert issubclass(kind, ValueError)
    assert issubclass(kind, EngineError)


@pytest.mark.parametrize("kind", [DeviceError, StartupError, InvariantError])
def test_faults_that_are_not_the_callers_are_never_request_errors(kind: type[Exception]) -> None:
    assert not issubclass(kind, RequestError)


def test_an_invariant_error_passes_through_a_handler_of_engine_errors() -> None:
    assert issubclass(InvariantError, AssertionError)
    assert not issubclass(InvariantError, EngineError)


def test_a_request_error_names_the_field_at_fault_also_after_crossing_a_process_border() -> None:
    error = InvalidParameterError("top_p must lie in (0, 1]; got 7", parameter="top_p")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.parameter, type(copy)) == (str(error), "top_p", InvalidParameterError)
    assert RequestError("no field").parameter is None


def drawn_tree() -> dict[str, set[str]]:
    """Return the names in the docstring's tree, each with its bases: the one it hangs from, and those in brackets."""
    path, tree = list[str](), dict[str, set[str]]()
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"((?:│   )*(?:[├└]── )?)(\w+Error)(?: \((\w+)\))?(?:  |$)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            tree[found[2]] = {*path[depth - 1 : depth], *filter(None, [found[3]])} or {"Exception"}
    return tree


def true_tree() -> dict[str, set[str]]:
    """Return every class of serving that descends from one drawn at the left margin, with its bases."""
    sources = import_rules.read_tree().sources
    classes = {
        node.name: {ast.unparse(base) for base in node.bases}
        for module, source in sources.items()
        if module.startswith("gdn_jax.serving")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    tree: dict[str, set[str]] = {}
    ours = {"EngineError", "InvariantError", "SettingError"}
    while ours:
        tree |= {name: classes[name] for name in ours}
        ours = {name for name, bases in classes.items() if bases & ours} - tree.keys()
    return tree


def test_the_tree_in_the_docstring_is_the_true_tree() -> None:
    assert drawn_tree() == true_tree()
    assert {"EngineStoppedError", "UnknownParameterError", "InvariantError"} <= drawn_tree().keys()


def test_every_drawn_error_is_raised_somewhere_and_says_where_it_stands() -> None:
    sources = import_rules.read_tree().sources
    raised = {name for source in sources.values() for name in re.findall(r"\b(\w+Error)\(", source)}
    leaves = drawn_tree().keys() - {base for bases in drawn_tree().values() for base in bases}
    assert leaves <= raised
    for name, file in re.findall(r"(\w+Error) .*in `(\w+)\.py`", errors.__doc__ or ""):
        assert f"class {name}(" in sources[f"gdn_jax.serving.{file}"]


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names)
