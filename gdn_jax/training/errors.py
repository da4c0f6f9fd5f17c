"""Errors of training.

ModelError
└── TrainingError           what was given cannot be trained with: settings, text, a checkpoint of another run; no room
RuntimeError
└── DivergedError           loss or gradient stopped being finite
"""

from gdn_jax.errors import ModelError


class TrainingError(ModelError):
    """Settings, text or an earlier checkpoint do not fit, or the out folder takes no more."""


class DivergedError(RuntimeError):
    """Loss or gradient was not finite for too many steps in a row; no checkpoint holds a value that is not."""


def require(holds: bool, name: str, rule: str, value: object) -> None:
    """Refuse a setting that does not hold its rule.

    Raises:
        TrainingError: it does not.
    """
    if not holds:
        raise TrainingError(f"{name} must {rule}; got {value!r}; correct it")
