"""Checks of annotations while tests run: jaxtyping's where arrays are annotated, elsewhere beartype's alone.

jaxtyping binds the arguments of every call to their names, remembers shapes by them, and has beartype check them twice.
A function of the host alone, of which an engine calls hundreds in a step, has no shapes: beartype itself checks its
annotations as strictly, in a tenth of the time. Errors are of the same class, and both are off where jaxtyping is.
"""

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError

_check_all = jaxtyping.jaxtyped
_check_plain = beartype(conf=BeartypeConf(violation_type=TypeCheckError))
_OF_ARRAYS = ("jax", "jaxlib", "jaxtyping", "flax")  # packages whose types are left to jaxtyping


def is_plain(hint: Any) -> bool:
    """Return whether an annotation surely speaks of no array, and reads the same wherever it stands."""
    if hint in (None, Any, ..., inspect.Parameter.empty) or typing.get_origin(hint) is typing.Literal:
        return True
    if isinstance(hint, list):  # parameters of a Callable
        return all(map(is_plain, hint))
    if isinstance(hint, typing.TypeAliasType):
        return is_plain(hint.__value__)
    if isinstance(hint, typing.NewType):
        return is_plain(hint.__supertype__)
    if origin := typing.get_origin(hint):
        return is_plain(origin) and all(map(is_plain, typing.get_args(hint)))
    return (isinstance(hint, type) and hint.__module__.split(".")[0] not in _OF_ARRAYS) or hint is typing.Union


def jaxtyped(fn: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """Do as jaxtyping's decorator of this name, which its import hook puts on every function and class of ours."""
    if fn is None:
        return partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(fn):
        is_left_out = getattr(fn, "__no_type_check__", False)
        if is_dataclass(fn) and not is_left_out and not hasattr(fn.__init__, "__wrapped__"):
            fn.__init__ = jaxtyped(fn.__init__, typechecker=typechecker)
        return fn
    hints = getattr(fn, "__annotations__", {}).values()
    if not isinstance(fn, types.FunctionType) or inspect.isgeneratorfunction(fn) or not all(map(is_plain, hints)):
        return _check_all(fn, typechecker=typechecker)
    checked = _check_plain(fn)

    @wraps(fn)
    def unless_disabled(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return (fn if jaxtyping.config.jaxtyping_disable else checked)(*args, **kwargs)

    return unless_disabled


def install() -> None:
    """Have modules of ours that are imported from now on checked so."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook("gdn_jax", "beartype.beartype")
