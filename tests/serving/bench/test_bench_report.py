"""What benchmarks report beside times: work between two moments, and files that can be written."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.quick_engine import quick_llm

from gdn_jax.serving.bench.report import EngineWork, check_writable, measured_with, write_json
from gdn_jax.serving.config import SettingError

NOTHING = quick_llm().stats()


def test_work_is_what_was_done_between_two_moments() -> None:
    before = replace(NOTHING, queried_tokens=100, hit_tokens=90, verified_rows=10, accepted_tokens=30, compilations=4)
    after = replace(before, queried_tokens=300, hit_tokens=140, verified_rows=14, accepted_tokens=32)
    work = EngineWork.between(before, after)
    assert work == EngineWork(prefix_cache_hit_rate=0.25, tokens_per_verify=1.5, compilations=0)
    assert work.lines() == ("Prefix cache hit rate: 25.0%", "Tokens per verify: 1.50")


def test_an_engine_without_hits_and_drafts_has_no_line_about_them() -> None:
    work = EngineWork.between(NOTHING, NOTHING)
    assert work == EngineWork(prefix_cache_hit_rate=0.0, tokens_per_verify=0.0, compilations=0)
    assert work.lines() == ()


def test_compiling_in_the_time_measured_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gdn_jax"):
        assert EngineWork.between(NOTHING, replace(NOTHING, compilations=3)).compilations == 3
    assert "3 steps were compiled in the time measured" in caplog.text


def test_what_was_measured_with_says_device_versions_kernels_and_settings() -> None:
    found = measured_with(quick_llm(lanes=3), EngineWork.between(NOTHING, NOTHING))
    assert found["kernels"] == "jax"
    assert (found["max_num_seqs"], found["max_model_len"]) == (3, 256)
    assert found["device"]
    versions, settings = found["versions"], found["settings"]
    assert isinstance(versions, dict)
    assert isinstance(settings, dict)
    assert {"python", "jax", "gdn-jax"} <= set(versions)
    assert settings["prefix_cache"] == "all"
    json.dumps(found)


def test_a_file_that_cannot_be_written_is_refused_before_and_after(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path, file / "below"):
        with pytest.raises(SettingError, match="output_json must be a file that can be written; got"):
            check_writable(str(path))
        with pytest.raises(SettingError, match="output_json must be a file that can be written; got"):
            write_json(str(path), {})
    check_writable(str(tmp_path / "new" / "results.json"))
    assert list((tmp_path / "new").iterdir()) == []
    write_json(str(tmp_path / "new" / "results.json"), {"key": 1})
    check_writable(str(tmp_path / "new" / "results.json"))
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == {"key": 1}
