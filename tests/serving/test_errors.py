"""The error tree: who catches what."""

import ast
import pickle
import sys
from pathlib import Path

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


def test_the_tree_in_the_docstring_names_every_error_of_the_module() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    drawn = {word.strip("├└─│ ").split(" ")[0] for word in (errors.__doc__ or "").splitlines()}
    assert defined <= drawn


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names)
