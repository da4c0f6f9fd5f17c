"""Which part may import what, and how the sources are read to see whether they keep to it.

Module names are the installed ones: kernels/ is `gdn_jax.kernels`, serving/ is `gdn_jax.serving`. A part is written
without the leading `gdn_jax.`; the part "model" is every module of gdn_jax/ itself.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"gdn_jax": ROOT / "gdn_jax", "gdn_jax.kernels": ROOT / "kernels", "gdn_jax.serving": ROOT / "serving"}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the modules of one part may import, beside each other and the standard library."""

    ours: frozenset[str] = frozenset()  # parts, or modules within a part
    others: frozenset[str] = frozenset()  # top-level names of other distributions
    never: frozenset[str] = frozenset()  # modules of the standard library


def _rule(ours: str = "", others: str = "", never: str = "") -> Rule:
    return Rule(ours=frozenset(ours.split()), others=frozenset(others.split()), never=frozenset(never.split()))


_CORE_NEVER = "asyncio concurrent datetime multiprocessing random secrets select selectors socket threading time uuid"
_STEP = "serving.core serving.runner serving.text serving.config serving.metrics"  # what one engine step is made of
_LOOP = "serving.engine serving.engine_types serving.collector serving.startup serving.prompts"  # drives steps
_API = "serving.sampling_params serving.outputs"  # values that callers hold

RULES = {
    "kernels": _rule(others="jax numpy jaxtyping"),
    "model": _rule("kernels", "jax flax numpy ml_dtypes safetensors jaxtyping"),
    "training": _rule(
        "model kernels", "jax flax numpy optax tokenizers safetensors tqdm matplotlib jaxtyping"
    ),  # nobody imports it: the command line loads it by name
    "training.dialogues": _rule(),  # data is made from the standard library alone
    "serving": _rule(),  # serving/__init__.py alone: every other module of serving needs a row of its own
    "serving.core": _rule(never=_CORE_NEVER),  # no clock, no randomness, no threads, no network
    "serving.runner": _rule(
        "model kernels serving.core.plan serving.core.request serving.core.errors", "jax flax numpy jaxtyping"
    ),
    "serving.text": _rule("serving.core.errors", "tokenizers jinja2"),
    "serving.config": _rule(),
    "serving.interrupts": _rule(),
    "serving.metrics": _rule(),
    "serving.sampling_params": _rule("serving.core.errors"),
    "serving.outputs": _rule("serving.core.errors"),
    "serving.cut": _rule("serving.core serving.text serving.sampling_params"),
    "serving.engine_types": _rule("serving.core serving.cut serving.sampling_params"),
    "serving.engine": _rule(f"{_STEP} serving.cut serving.sampling_params serving.engine_types serving.interrupts"),
    "serving.async_engine": _rule(
        f"{_STEP} {_API} serving.engine serving.engine_types serving.prompts serving.collector"
    ),
    "serving.prompts": _rule("serving.core.errors serving.text"),
    "serving.bad_words": _rule("serving.core.errors serving.text serving.runner"),
    "serving.collector": _rule(f"{_API} serving.core serving.text serving.engine_types serving.prompts"),
    "serving.startup": _rule(f"{_STEP} model kernels serving.engine", "jax tqdm"),
    "serving.info": _rule("model serving.core.errors serving.runner"),
    "serving.intake": _rule(
        f"{_API} serving.core serving.runner serving.engine_types serving.collector serving.prompts serving.startup "
        "serving.bad_words"
    ),
    "serving.llm": _rule(f"{_STEP} {_API} {_LOOP} serving.intake serving.interrupts", "tqdm"),
    "serving.async_llm": _rule(f"{_STEP} {_API} {_LOOP} serving.intake serving.async_engine"),
    "serving.http": _rule(
        f"{_API} serving.prompts serving.config serving.metrics serving.core.errors",
        "starlette uvicorn msgspec prometheus_client",
    ),
    "serving.bench": _rule(
        f"{_API} serving.llm serving.engine_types serving.text serving.config serving.core.errors",
        "jax numpy tqdm tyro",
    ),
    "serving.flags": _rule("serving.config", "tyro"),
    "serving.__main__": _rule(),  # loads serving.command_line by name
    "serving.command_line": _rule(
        f"{_STEP} {_API} model kernels serving.info serving.llm serving.async_llm serving.startup serving.http "
        "serving.engine_types serving.bench serving.flags",
        "tqdm tyro",
    ),
}


# Functions that are compiled on their own, by module: docs/decisions/0002-where-jit-stands.md says why each may be.
JITTED = {
    "serving.runner.steps": {"prefill_step", "advance_step", "place_history"},
    "serving.runner.prompt_scores": {"score_prompts"},
    "kernels.causal_conv1d": {"causal_conv1d_prefill", "causal_conv1d_advance"},
    "kernels.gated_delta": {"gdn_prefill", "gdn_advance"},
    "kernels.gated_delta.inputs": {"delta_inputs"},
    "kernels.gated_rms_norm": {"gated_rms_norm"},
    "kernels.gated_delta.mosaic_advance": {"gdn_advance"},
    "kernels.gated_delta.mosaic_prefill": {"gdn_prefill"},
    "kernels.gdn_mixer.mosaic_advance": {"gdn_mixer_advance"},
    "kernels.gdn_mixer.mosaic_prefill": {"gdn_mixer_prefill"},
    "kernels.paged_attention.mosaic_advance": {"paged_attention_advance"},
    "kernels.paged_attention.mosaic_prefill": {"paged_attention_prefill"},
    "model": {"_prompt_logits"},
    "dummy": {"_draw"},
    "slabs": {"_store"},
    "training.parameters": {"initial_parameters"},
    "training.step": {"train_step", "evaluation_step"},
    "quantization": {"decode"},
}
_COMPILERS = {"jit", "pmap", "pjit"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module and how it is imported."""

    target: str  # an installed name; the module itself, not its package
    line: int
    late: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`
    comment: str  # what stands beside it or on the line above


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Sources by installed module name, and the table of names that gdn_jax loads on first use."""

    sources: dict[str, str]
    lazy: dict[str, str]

    def imports(self, module: str) -> Iterator[Import]:
        """Yield what a module imports, a lazy name as the module behind it."""
        lines = self.sources[module].splitlines()
        for node, late, typing_only in _import_nodes(ast.parse(self.sources[module])):
            above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
            comment = lines[node.lineno - 1].partition("#")[2] + (above if above.startswith("#") else "")
            for target in self._targets(node):
                yield Import(target=target, line=node.lineno, late=late, typing_only=typing_only, comment=comment)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> Iterable[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if node.level:
            return ["." * node.level + (node.module or "")]
        return [self._module_of(str(node.module), alias.name) for alias in node.names]

    def _module_of(self, package: str, name: str) -> str:
        if package == "gdn_jax" and name in self.lazy:
            return self.lazy[name]
        return f"{package}.{name}" if f"{package}.{name}" in self.sources else package


def _import_nodes(
    tree: ast.AST, *, late: bool = False, typing_only: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late, typing_only
        yield from _import_nodes(
            child,
            late=late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef),
            typing_only=typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)),
        )


def read_tree() -> Tree:
    """Read every module of the three packages."""
    sources = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            sources[".".join((package, *parts)).removesuffix(".__init__")] = path.read_text()
    for node in ast.parse(sources["gdn_jax"]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LAZY":
            return Tree(sources=sources, lazy=ast.literal_eval(node.value))
    raise LookupError("gdn_jax/__init__.py has no table _LAZY")


def part_of(module: str) -> str:
    """Return the part that one of our modules belongs to: the longest that fits."""
    short = module.removeprefix("gdn_jax").removeprefix(".")
    return max((part for part in RULES if _within(short, part)), key=len, default="model")


def breaches(tree: Tree) -> list[str]:
    """Return one sentence for each import that the rules do not allow."""
    found = []
    for module in tree.sources:
        part = part_of(module)
        if part == "serving" and module != "gdn_jax.serving":
            found.append(f"{module} has no row in the table of allowed imports")
            continue
        for item in tree.imports(module):
            if module == "gdn_jax" and item.typing_only:
                continue  # the lazy names, for type checkers
            where = f"{module}, line {item.line}, imports {item.target}"
            if item.target.startswith("."):
                found.append(f"{where}: a relative import; write the full name")
            elif not _allowed(part, item.target):
                found.append(f"{where}: its row of the table does not have that")
            elif item.late and not _optional(item):
                found.append(
                    f"{where} inside a function: only an optional dependency, named in a comment, may stand there"
                )
    return found


def cycle(tree: Tree) -> list[str]:
    """Return the modules of one circle of imports, empty if there is none."""
    graph = {
        module: {item.target for item in tree.imports(module) if item.target in tree.sources and not item.typing_only}
        for module in tree.sources
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def jits(tree: Tree) -> dict[str, set[str]]:
    """Return the functions under a jit by module, without the leading `gdn_jax.`; a jit elsewhere goes by its line."""
    found: dict[str, set[str]] = {}
    for module, source in tree.sources.items():
        places: set[str] = set()
        top = ast.parse(source).body
        for node in top:
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            jitted = any(_is_compiler(part) for decorator in decorators for part in ast.walk(decorator))
            if isinstance(node, ast.FunctionDef) and jitted:
                places.add(node.name)
            own = {id(part) for decorator in decorators for part in ast.walk(decorator)}
            places |= {f"line {part.lineno}" for part in ast.walk(node) if _is_compiler(part) and id(part) not in own}
        if places:
            found[module.removeprefix("gdn_jax.")] = places
    return found


def _is_compiler(node: ast.AST) -> bool:
    if isinstance(node, ast.alias):
        return node.name in _COMPILERS
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in _COMPILERS


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _allowed(part: str, target: str) -> bool:
    rule, top = RULES[part], target.split(".")[0]
    if top != "gdn_jax":
        return top in rule.others or (top in sys.stdlib_module_names and top not in rule.never)
    if target == "gdn_jax":  # the version, and nothing that loads a module; the kernels know nothing of ours
        return part != "kernels"
    short = target.removeprefix("gdn_jax.")
    return part_of(target) == part or part_of(target) in rule.ours or any(_within(short, name) for name in rule.ours)


def _optional(item: Import) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {line.split(">")[0].replace("-", "_") for line in project["dependencies"]}
    top = item.target.split(".")[0]
    return top not in {"gdn_jax", *required, *sys.stdlib_module_names} and top in item.comment
