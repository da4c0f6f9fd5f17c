"""What the package promises to the outside: its names, its version, docstrings, and kernels in two versions."""

import ast
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import import_rules
import pytest

import gdn_jax

TREE = import_rules.read_tree()
KERNELS = sorted(path.parent for path in import_rules.PACKAGES["gdn_jax.kernels"].glob("*/__init__.py"))
type Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_nodes(node: Node, name: str) -> Iterator[tuple[str, Node]]:
    """Yield a module or class and, with dotted names, what is public in it; a function in a function is private."""
    yield name, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            inner = f"{name}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from public_nodes(child, inner)
            else:
                yield inner, child


def parameters(path: Path) -> dict[str, list[str]]:
    """Map each public function of a source file to its parameters, without the choice of an implementation."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    named = {node.name: [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)] for node in functions}
    return {
        name: [arg for arg in args if arg != "implementation"]
        for name, args in named.items()
        if not name.startswith("_")
    }


def chosen(path: Path) -> set[str]:
    """Return the public functions of a package that take the choice of an implementation."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if "implementation" in [arg.arg for arg in node.args.kwonlyargs]}


@pytest.mark.parametrize("name", sorted(TREE.lazy))
def test_every_exported_name_loads_and_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(gdn_jax, name))
    assert name in dir(gdn_jax)


def test_the_exported_names_are_the_lazy_ones_and_the_version() -> None:
    assert sorted(gdn_jax.__all__) == sorted([*TREE.lazy, "__version__"])


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Sampler'; it has .*SamplingParams"):
        getattr(gdn_jax, "Sampler")  # noqa: B009  # a type checker knows that it is not there


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert gdn_jax.__version__ == version("gdn-jax")


def test_everything_public_has_a_docstring() -> None:
    bare = [
        name
        for module, source in TREE.sources.items()
        for name, node in public_nodes(ast.parse(source), module)
        if not ast.get_docstring(node)
    ]
    assert bare == []


@pytest.mark.parametrize("folder", KERNELS, ids=lambda folder: folder.name)
def test_every_kernel_package_has_a_readme_and_a_reference_beside_its_plain_version(folder: Path) -> None:
    assert (folder / "README.md").read_text().strip()
    public = parameters(folder / "__init__.py")
    plain = next(path for name in ("plain", "chunked") if (path := folder / f"{name}.py").is_file())
    names = chosen(folder / "__init__.py")
    assert names
    for name in names:
        assert parameters(folder / "reference.py")[name] == public[name]
        assert parameters(plain)[name] == public[name]
