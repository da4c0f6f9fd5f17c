"""Random weights need no tokenizer: token ids go in and come out, and text is refused by name."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from oracles.engine_rig import TINY, make_llm

from gdn_jax import SamplingParams
from gdn_jax.serving.core.errors import InvalidPromptError, StartupError
from gdn_jax.serving.text.no_tokenizer import NoTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds a config alone."""
    shutil.copy(TINY / "config.json", tmp_path)
    return tmp_path


def test_every_id_is_a_token_without_text() -> None:
    stand_in = NoTokenizer(TINY, 500, config_eos=(3,))
    assert (stand_in.num_tokens, stand_in.vocab_size) == (500, 500)
    assert stand_in.decode([1, 2]) == ""
    assert stand_in.token_bytes(1) == b""
    assert not stand_in.is_special(1)
    with pytest.raises(InvalidPromptError, match="takes token ids alone; got text; set tokenizer to a folder"):
        stand_in.encode("text")


def test_end_tokens_are_those_of_the_models_own_files_and_of_its_vocabulary(tmp_path: Path) -> None:
    assert NoTokenizer(tmp_path, 10, config_eos=(3, 12)).end_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "temperature": 0.5}))
    stand_in = NoTokenizer(tmp_path, 10, config_eos=(3,))
    assert stand_in.end_token_ids == (7, 5)
    assert stand_in.generation_defaults.temperature == 0.5


def test_a_config_alone_runs_token_ids_with_random_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gdn_jax"):
        llm = make_llm(folder, load_format="dummy")
    assert f"tokenizer: none in {folder}" in caplog.text
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    (completion,) = output.outputs
    assert (len(completion.token_ids), completion.text, completion.finish_reason) == (5, "", "length")
    with pytest.raises(InvalidPromptError, match="takes token ids alone"):
        llm.generate("text", params, use_tqdm=False)


def test_a_tokenizer_that_is_named_or_that_weights_want_must_be_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer.json is missing"):
        make_llm(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError, match=r"empty/tokenizer.json is missing"):
        make_llm(folder, load_format="dummy", tokenizer=str(tmp_path / "empty"))


def test_random_weights_read_the_tokenizer_where_there_is_one() -> None:
    llm = make_llm(TINY, load_format="dummy")
    assert not isinstance(llm.get_tokenizer(), NoTokenizer)
