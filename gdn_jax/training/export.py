"""The trained model as a folder that loads like a release: 16-bit weights, config.json, the tokenizer's files.

What the engine holds in float32 (A_log, dt_bias, the GDN norm) is float32 in the files too; all else is rounded once,
which gives the values that a run with `compute_dtype = "bfloat16"` computed with.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from gdn_jax.config import ModelConfig
from gdn_jax.training.checkpoint import stored_tensors, whole_folder
from gdn_jax.training.parameters import Params, make_layout
from gdn_jax.training.shards import write_json, write_tensors

# Copied where the tokenizer's folder has them.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def export_model(
    folder: Path,
    params: Params,
    config: ModelConfig,
    *,
    published: Mapping[str, object],
    tokenizer: str | Path,
    most_bytes: int,
) -> None:
    """Write a model folder; one that is there already is replaced when the new one is whole.

    Args:
        folder: of the model.
        params: float32, by tensor name.
        config: of the model.
        published: content of config.json, but for the dtype.
        tokenizer: folder with the text files.
        most_bytes: of one weight file; 0 for one file.

    Raises:
        TrainingError: the folder cannot be written.
    """
    layout = make_layout(config, "bfloat16")
    rounded = {name: jax.device_get(params[name]).astype(jnp.dtype(dtype)) for name, _, _, dtype in layout.leaves}
    with whole_folder(folder) as unfinished:
        write_tensors(unfinished, "model", stored_tensors(layout, rounded), most_bytes=most_bytes)
        write_json(unfinished / "config.json", {**published, "dtype": "bfloat16"})
        for name in _TEXT_FILES:
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, unfinished / name)
