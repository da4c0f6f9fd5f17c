"""How a mistake in a setting is told to whoever typed it: by the flag, not by the field that the flag fills."""

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from gdn_jax.serving.config import SettingError


class RefusedFlagError(Exception):
    """A value that its settings refuse. It is no ValueError: tyro would tell of those by the names of fields."""


def settings_of(command: object) -> set[str]:
    """Return the fields that the flags of a command fill, by name, those of the settings within it too."""
    found: set[str] = set()
    if is_dataclass(command):
        for item in fields(command):
            found |= settings_of(getattr(command, item.name)) or {item.name}
    return found


def in_flags(message: str, settings: Iterable[str]) -> str:
    """Return a message that names flags in the place of settings.

    A name of one plain word is taken for a setting only where a message begins by saying what it must be.
    """
    if not (names := "|".join(settings)):
        return message

    def flag(found: re.Match[str]) -> str:
        is_setting = "_" in found[0] or (found.start() == 0 and message.startswith(" must ", found.end()))
        return f"--{found[0].replace('_', '-')}" if is_setting else found[0]

    return re.sub(rf"(?<![\w./-])({names})(?![\w/-])", flag, message)


def refusals_in_flags() -> ConstructorRegistry:
    """Return rules for tyro by which settings that refuse a value end the parsing with a RefusedFlagError."""
    rules, is_asking = ConstructorRegistry(), False

    @rules.struct_rule
    def tell_refusals(info: StructTypeInfo) -> StructConstructorSpec | None:
        """Make a dataclass of ours as tyro does, but for what becomes of a refusal."""
        nonlocal is_asking
        if is_asking or not is_dataclass(info.type) or not info.type.__module__.startswith("gdn_jax."):
            return None
        is_asking = True  # tyro's own rule is looked for among all rules, this one too
        try:
            usual = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_asking = False
        if not isinstance(usual, StructConstructorSpec):
            return None

        def instantiate(**given: Any) -> object:
            try:
                return usual.instantiate(**given)
            except SettingError as refusal:
                names = [item.name for item in fields(info.type)]
                raise RefusedFlagError(in_flags(str(refusal), names)) from refusal

        instantiate.__doc__ = info.type.__doc__  # a command's help
        return replace(usual, instantiate=instantiate)

    return rules
