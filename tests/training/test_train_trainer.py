"""Whole runs of a small model: they learn, go on bit for bit, skip what is not finite, and leave a model that loads."""

import dataclasses
import json
import math
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.engine_rig import TINY
from safetensors import SafetensorError
from training.train_rig import MODEL, make_config, write_text_folder

from gdn_jax.config import ModelConfig
from gdn_jax.model import load_model
from gdn_jax.training import step as step_module
from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.checkpoint import whole_folder
from gdn_jax.training.errors import DivergedError, TrainingError
from gdn_jax.training.parameters import Layout
from gdn_jax.training.shards import read_tensors
from gdn_jax.training.step import StepSetup, TrainState, evaluation_step, train_step
from gdn_jax.training.stop import StopSignal
from gdn_jax.training.trainer import Trainer
from gdn_jax.weights import has_mtp


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory) -> Trainer:
    """A run of thirty steps at once."""
    trainer = Trainer(make_config(text, tmp_path_factory.mktemp("straight"), shard_mib=0.05), quiet=True)
    assert trainer.run() == "finished"
    return trainer


def out_of(trainer: Trainer) -> Path:
    return Path(trainer._config.run.out)


def assert_equal_bits(one: TrainState, other: TrainState) -> None:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def test_a_run_that_was_broken_off_goes_on_bit_for_bit(text, tmp_path, straight):
    config = make_config(text, tmp_path)
    first = Trainer(config, quiet=True)
    assert first.run(stop_after=17) == "time limit"
    assert not (tmp_path / "model").exists()
    second = Trainer(config, quiet=True)
    assert second.progress.step == 17
    assert_equal_bits(first.state, second.state)
    assert second.run() == "finished"
    assert_equal_bits(second.state, straight.state)
    assert second.progress.history == straight.progress.history
    assert second.progress.held_out == straight.progress.held_out
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000017", "step-00000030"]


def test_a_finished_run_has_nothing_left_to_do(straight):
    again = Trainer(straight._config, quiet=True)
    assert again.run() == "finished"
    assert_equal_bits(again.state, straight.state)


def test_no_step_is_traced_twice(text, tmp_path, straight):
    traced = train_step._cache_size(), evaluation_step._cache_size()
    assert Trainer(make_config(text, tmp_path), quiet=True).run() == "finished"
    assert (train_step._cache_size(), evaluation_step._cache_size()) == traced


def test_the_history_and_the_plot_are_there(straight):
    assert [entry["step"] for entry in straight.progress.history] == [*range(1, 31)]
    assert straight.progress.history[-1]["tokens"] == straight.progress.tokens == 30 * 4 * 64
    assert set(straight.progress.history[0]) >= {"loss", "next_token", "mtp_1", "grad_norm", "targets"}
    assert straight.progress.history[0]["next_token"] == pytest.approx(math.log(320), rel=0.2)
    assert [entry["step"] for entry in straight.progress.held_out] == [15, 30]
    assert set(straight.progress.held_out[0]["losses"]) == {"prose", "arithmetic"}
    assert (out_of(straight) / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_is_a_float32_model_in_shards(straight):
    folder = out_of(straight) / "checkpoints" / "step-00000030"
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 4
    assert max(path.stat().st_size for path in files) < 0.06 * 2**20
    model = load_model(folder)
    assert model.dtype == jnp.float32
    table = straight.state.params["model.layers.0.linear_attn.conv1d.weight"]
    np.testing.assert_array_equal(model.decoder.layers[0].mixer.conv_weight[...], table)


def test_the_exported_model_loads_and_holds_what_was_computed_with(straight):
    folder = out_of(straight) / "model"
    names = {path.name for path in TINY.iterdir()} - {"model.safetensors", "golden.json", "golden.safetensors"}
    assert names <= {path.name for path in folder.iterdir()}
    assert has_mtp(folder)
    model, stored = load_model(folder), read_tensors(folder, "model")
    assert model.dtype == jnp.bfloat16
    kept = {name for name, tensor in stored.items() if tensor.dtype == np.float32}
    assert {name.partition("linear_attn.")[2] for name in kept} == {"A_log", "dt_bias", "norm.weight"}
    masters = straight.state.params["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.decoder.embed_tokens.weight[...], masters.astype(jnp.bfloat16))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["dtype"], config["eos_token_id"]) == ("bfloat16", 304)
    sizes = dataclasses.replace(ModelConfig.from_dict(MODEL), eos_token_ids=(304,))
    assert ModelConfig.from_dict(config) == sizes


def test_going_on_with_other_settings_is_refused_by_name(text, straight):
    config = dataclasses.replace(straight._config, model={**MODEL, "hidden_size": 48, "linear_key_head_dim": 24})
    with pytest.raises(TrainingError, match=r"model\.hidden_size was 32 and is 48; model\.linear_key_head_dim was 16"):
        Trainer(config, quiet=True)
    slower = dataclasses.replace(straight._config.optimizer, peak_learning_rate=0.25)
    with pytest.raises(TrainingError, match=r"optimizer\.peak_learning_rate was 0\.02 and is 0\.25"):
        Trainer(dataclasses.replace(straight._config, optimizer=slower), quiet=True)


def test_a_damaged_checkpoint_is_refused_and_a_half_written_one_is_not_seen(text, tmp_path):
    config = make_config(text, tmp_path)
    (tmp_path / "checkpoints" / ".unfinished-1-step-00000009").mkdir(parents=True)
    trainer = Trainer(config, quiet=True)
    assert trainer.progress.step == 0
    trainer.run(stop_after=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    file = tmp_path / "checkpoints" / "step-00000001" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(TrainingError, match="must be whole"):
        Trainer(config, quiet=True)
    assert Trainer(config, resume=False, quiet=True).progress.step == 0
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_progress_of_another_form_and_names_of_another_form(text, tmp_path):
    (tmp_path / "checkpoints" / "step-old").mkdir(parents=True)
    trainer = Trainer(make_config(text, tmp_path), quiet=True)
    assert trainer.progress.step == 0
    (tmp_path / "checkpoints" / "step-00000001").mkdir()
    (tmp_path / "checkpoints" / "step-00000001" / "progress.json").write_text('{"settings": 3}')
    with pytest.raises(TrainingError, match="must be whole"):
        Trainer(make_config(text, tmp_path), quiet=True)
    Trainer(make_config(text, tmp_path), resume=False, quiet=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-old"]


def test_what_a_killed_process_of_the_same_id_left_is_no_hindrance(text, tmp_path):
    trainer = Trainer(make_config(text, tmp_path), quiet=True)
    left = tmp_path / "checkpoints" / f".unfinished-{os.getpid()}-step-00000000"
    left.mkdir()
    (left / "model.safetensors").touch()
    assert trainer._checkpoints.write(trainer.state, trainer.progress).name == "step-00000000"
    left = tmp_path / f".unfinished-{os.getpid()}-model"
    left.mkdir()
    (left / "old").touch()
    with whole_folder(tmp_path / "model") as unfinished:
        (unfinished / "new").touch()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]


@pytest.mark.parametrize("error", [OSError("No space left"), SafetensorError("No space left")])
def test_a_full_disk_is_one_error_and_leaves_nothing_half_written(text, tmp_path, monkeypatch, error):
    def refuse(*arguments, **named):
        raise error

    trainer = Trainer(make_config(text, tmp_path), quiet=True)
    trainer._checkpoints.write(trainer.state, trainer.progress)
    trainer.progress.step = 1
    monkeypatch.setattr("gdn_jax.training.shards.save_file", refuse)
    with pytest.raises(TrainingError, match=r"room to write in; .*step-00000001: No space left; make room"):
        trainer._checkpoints.write(trainer.state, trainer.progress)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]


def test_an_out_folder_that_cannot_be_written_is_refused_before_training(text, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"run\.out must be a folder with room to write in"):
        Trainer(make_config(text, tmp_path / "file"), quiet=True)


def test_only_the_newest_checkpoints_stay(text, tmp_path):
    Trainer(make_config(text, tmp_path, checkpoint_every=1, keep=2), quiet=True).run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000029", "step-00000030"]


def test_micro_batches_are_the_batch_each_counting_as_much_as_it_has_targets(straight, monkeypatch):
    def next_by_table(model, batch: TrainBatch, options):
        """A loss that compiles at once: the embedding of a token against that of the next, for odd documents only."""
        vectors, counts = model.decoder.embed_tokens(batch.token_ids), (batch.document % 2).astype(jnp.float32)
        total = (jnp.square(vectors - jnp.roll(vectors, 1, axis=1)).sum(axis=-1) * counts).sum()
        return total / counts.sum(), {"num_targets": counts.sum()}

    monkeypatch.setattr(step_module, "training_loss", next_by_table)
    batch = jax.device_put(straight._packer().batch(0))
    setups = [dataclasses.replace(straight._setup, micro_batches=count) for count in (1, 2, 4)]
    whole, *others = (jax.jit(partial(step_module._summed, setup))(straight.state.params, batch) for setup in setups)
    assert np.any(whole[0]["model.embed_tokens.weight"])
    for other in others:
        for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_step_without_finite_gradient_changes_nothing_and_too_many_end_the_run(text, tmp_path):
    trainer = Trainer(make_config(text, tmp_path, max_bad_steps=2), quiet=True)
    params = {**trainer.state.params, "model.norm.weight": jnp.full((32,), jnp.nan, jnp.float32)}
    trainer.state = trainer.state._replace(params=params)
    before = jax.device_get(trainer.state)
    with pytest.raises(DivergedError, match=r"2 steps in a row, up to step 2; begin anew \(another --out"):
        trainer.run()
    assert trainer.progress.skipped == 2
    assert_equal_bits(before, trainer.state)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("reason", ["interrupted", "time limit"])
def test_an_early_end_leaves_a_checkpoint(text, tmp_path, monkeypatch, reason):
    config = make_config(text, tmp_path, time_limit_s=1e-6 if reason == "time limit" else 0.0)
    if reason == "interrupted":
        monkeypatch.setattr(StopSignal, "is_set", property(lambda self: True, lambda self, value: None), raising=False)
    assert Trainer(config, quiet=True).run() == reason
    assert (tmp_path / "checkpoints" / "step-00000000" / "progress.json").is_file()


def test_a_vocabulary_below_the_tokenizers_is_refused(text, tmp_path):
    config = dataclasses.replace(make_config(text, tmp_path), model={**MODEL, "vocab_size": 300})
    with pytest.raises(TrainingError, match=r"model\.vocab_size must be at least the tokenizer's \d+; got 300"):
        Trainer(config, quiet=True)


def test_a_run_learns_its_text(straight):
    losses = [entry["next_token"] for entry in straight.progress.history]
    assert losses[0] > 5.0
    assert np.mean(losses[-3:]) < 2.6
    assert straight.progress.held_out[-1]["losses"]["prose"]["next_token"] < 2.6
    assert straight.progress.history[-1]["mtp_1"] < straight.progress.history[0]["mtp_1"] - 1.0


def test_static_settings_are_hashable(straight):
    assert isinstance(straight._setup.layout, Layout)
    assert hash(straight._setup) == hash(dataclasses.replace(straight._setup))
    assert isinstance(straight._setup, StepSetup)
