"""Models that lie in the package, found by name."""

import os
from pathlib import Path

_MODELS = Path(__file__).parent / "models"


def shipped_models() -> tuple[str, ...]:
    """Return the names of the models that came with the package."""
    return tuple(sorted(folder.parent.name for folder in _MODELS.glob("*/config.json")))


def model_folder(model: str | Path) -> str:
    """Return the folder that `model` means: a shipped model's if it is the name of one and no such path exists.

    Args:
        model: what a user names a model by; anything but a shipped name is returned as it is.
    """
    name = str(model)
    return str(_MODELS / name) if name in shipped_models() and not os.path.lexists(name) else name
