"""Rotary settings: the three spellings, YaRN, and scaling that must not be ignored."""

import dataclasses

import pytest
from released_configs import DENSE, FLAT, NEXT, RELEASED, YARN, read, refusal, released, with_outer

from gdn_jax.config import YarnConfig

YARN_READ = YarnConfig(factor=4.0, original_max_position=262144, attention_factor=1.138629436111989)


def test_rope_parameters_win_over_copies_beside_them() -> None:
    config = read(NEXT, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "default"})
    assert (config.rope_theta, config.rotary_dim) == (5e5, 128)
    config = read(DENSE, rope_parameters={"rope_type": "default"}, rope_theta=3e6, partial_rotary_factor=0.125)
    assert (config.rope_theta, config.rotary_dim) == (3e6, 32)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (NEXT, {"rope_scaling": YARN}),
        (NEXT, {"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}),
        (NEXT, {"rope_parameters": {**YARN, "rope_theta": 1e7}}),
        (DENSE, {"rope_parameters": {**RELEASED[DENSE]["text_config"]["rope_parameters"], **YARN}}),
        (DENSE, {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11, 10]}, "rope_scaling": YARN}),
        (FLAT, {"rope_parameters": {**RELEASED[FLAT]["rope_parameters"], **YARN}}),
    ],
)
def test_yarn_is_read_from_either_spelling(name: str, changes: dict) -> None:
    assert read(name, **changes) == dataclasses.replace(read(name), yarn=YARN_READ)
    assert (read(name).context_length, read(name, **changes).context_length) == (262144, 4 * 262144)


def test_yarn_settings_are_read() -> None:
    scaling = {**YARN, "factor": 2, "beta_fast": 16, "beta_slow": 2.0, "attention_factor": 1.5}
    assert read(NEXT, rope_scaling=scaling).yarn == YarnConfig(
        factor=2.0, original_max_position=262144, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5
    )


def test_a_longer_native_limit_than_that_of_yarn_stands() -> None:
    config = read(NEXT, rope_scaling={**YARN, "original_max_position_embeddings": 1000}, max_position_embeddings=9000)
    assert config.context_length == 9000


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {**YARN, "factor": None}}, "rope_scaling.factor"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "rope_scaling.factor"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor"),
        ({"rope_scaling": {**YARN, "rope_type": None}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, "beta_fast"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "rope_scaling must agree"),
    ],
)
def test_half_given_scaling_is_an_error_rather_than_ignored(changes: dict, named: str) -> None:
    assert named in refusal(released(NEXT, **changes))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_beside_the_text_config_is_an_error_rather_than_ignored(key: str) -> None:
    assert "inside text_config" in refusal(with_outer(released(DENSE), **{key: YARN}))
