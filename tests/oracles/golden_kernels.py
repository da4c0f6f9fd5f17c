"""Reading the recorded kernel values, which live outside the repository."""

from pathlib import Path

import numpy as np
from safetensors import safe_open


def golden_arrays(folder: Path, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays of `kernels.safetensors` whose names start with `prefix`, by the rest of their names."""
    with safe_open(folder / "kernels.safetensors", "np") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dictionary
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
