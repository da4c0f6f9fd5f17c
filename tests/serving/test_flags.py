"""Flags: which words of a message are settings, and become what a person types."""

import pytest

from gdn_jax.serving.command_line import Generate, Sampling
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.flags import in_flags, settings_of

NAMES = ("seed", "port", "model", "max_model_len", "num_blocks")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("port must be in 0..65535; got 7", "--port must be in 0..65535; got 7"),
        ("a port must be free; a seed is not", "a port must be free; a seed is not"),
        ("model files are missing", "model files are missing"),
        ("lower max_model_len, or num_blocks.", "lower --max-model-len, or --num-blocks."),
        ("num_blocks=3 of max_model_len (8)", "--num-blocks=3 of --max-model-len (8)"),
        (
            "runs/max_model_len is no folder, nor is num_blocks/x",
            "runs/max_model_len is no folder, nor is num_blocks/x",
        ),
        ("my_num_blocks and num_blocks_2", "my_num_blocks and num_blocks_2"),
    ],
)
def test_settings_are_named_by_their_flags_and_other_words_stay(message: str, told: str) -> None:
    assert in_flags(message, NAMES) == told
    assert in_flags(message, ()) == message


def test_the_settings_of_a_command_are_those_of_its_parts_too() -> None:
    command = Generate(prompt=("x",), engine=EngineConfig(model="m"), sampling=Sampling())
    assert {"prompt", "quiet", "max_model_len", "sampling_seed"} < settings_of(command)
    assert not {"engine", "sampling"} & settings_of(command)
