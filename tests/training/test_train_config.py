"""Training configs: the files in configs/train are read, and mistakes are refused by name."""

from pathlib import Path

import import_rules
import pytest

from gdn_jax.config import ModelConfig
from gdn_jax.sizes import parameter_count
from gdn_jax.training.config_file import read_train_config
from gdn_jax.training.errors import TrainingError
from gdn_jax.training.published import MODEL_KEYS, published_config

FILES = sorted(
    set((import_rules.ROOT / "configs" / "train").glob("*.toml")) - {import_rules.ROOT / "configs/train/sources.toml"}
)
MINIMAL = """
tokenizer = "t"
[model]
model_type = "qwen3_5_text"
[data]
folders = ["f"]
weights = { docs = 1 }
[run]
out = "o"
"""


def read(tmp_path: Path, text: str):
    (tmp_path / "run.toml").write_text(text)
    return read_train_config(tmp_path / "run.toml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_is_read_and_its_model_is_written_and_read_back(path):
    config = read_train_config(path)
    model = config.model_config()
    published = published_config(model, dtype=model.dtype, end_token=3)
    assert set(published) <= set(MODEL_KEYS)
    again = ModelConfig.from_dict(published)
    assert published_config(again, dtype=model.dtype, end_token=3) == published
    assert again.eos_token_ids == (3,)
    assert sum(parameter_count(again)) == sum(parameter_count(model)) < 20e6


def test_there_are_configs():
    assert {"pico.toml", "tiny.toml"} <= {path.name for path in FILES}


def test_a_minimal_file_has_the_defaults(tmp_path):
    config = read(tmp_path, MINIMAL)
    assert config.data.weights == {"docs": 1.0}
    assert config.optimizer.total_steps == 3000
    assert config.loss.mtp_depth == 3


def test_what_the_command_line_gives_wins(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    config = read_train_config(tmp_path / "run.toml", {"run": {"out": "elsewhere"}, "optimizer": {"total_steps": 900}})
    assert (config.run.out, config.optimizer.total_steps) == ("elsewhere", 900)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[run]", "[run]\nevaluate_evry = 3", "run.evaluate_evry is not known; the nearest key is run.evaluate_every"),
        ("[run]", "[runs]\nx = 1\n[run]", "runs is not known; the nearest key is run"),
        ("[data]", "hiden_size = 8\n[data]", "model.hiden_size is not known; the nearest key is model.hidden_size"),
        ('out = "o"', "", "run.out must be given"),
        ('tokenizer = "t"', "", "tokenizer must name a folder"),
        ('out = "o"', "out = 3", "run.out must be of type str; got 3"),
        ("[run]", "[run]\nseed = 1.5", "run.seed must be of type int; got 1.5"),
        ("[run]", "[run]\nkeep = 0", "run.keep must be at least 1; got 0"),
        ("[run]", '[run]\ncompute_dtype = "float16"', "run.compute_dtype must be bfloat16 or float32; got 'float16'"),
        ("docs = 1", "docs = -1", "data.weights.docs must be above 0"),
        ("docs = 1", "docs = true", "data.weights must be a table of numbers; got {'docs': True}"),
        ("{ docs = 1 }", '["docs"]', "data.weights must be a table of numbers; got ['docs']"),
        ('["f"]', "{ f = 1 }", "data.folders must be a list of strings; got {'f': 1}"),
        ('["f"]', '"f"', "data.folders must be a list of strings; got 'f'"),
        ("docs = 1", "docs = nan", "data.weights.docs must be a finite number; got nan"),
        ("[run]", "[optimizer]\npeak_learning_rate = inf\n[run]", "optimizer.peak_learning_rate must be a finite"),
        ("[run]", f"[optimizer]\neps = 1{'0' * 400}\n[run]", "optimizer.eps must be a finite number; got 1000"),
        ("[run]", "[run]\nshard_mib = inf", "run.shard_mib must be a finite number; got inf"),
        ('["f"]', "[]", "data.folders must name at least one folder"),
        ("[run]", "[optimizer]\nwarmup_steps = 3000\n[run]", "optimizer.warmup_steps must be in 0..total_steps - 1"),
        ("[run]", "[optimizer]\nbeta2 = 1.0\n[run]", "optimizer.beta2 must be in [0, 1); got 1.0"),
        ("[run]", "[batch]\nrows = 6\nmicro_batches = 4\n[run]", "batch.micro_batches must divide batch.rows (6)"),
        ("[run]", "[loss]\nmtp_depth = 9\n[run]", "loss.mtp_depth must be in 1..8; got 9"),
        ("weights", "sequence_length = 100\nweights", "data.sequence_length must be a multiple of 64; got 100"),
        ('[model]\nmodel_type = "qwen3_5_text"', "model = 3", "model must be a table; got 3"),
        ('[model]\nmodel_type = "qwen3_5_text"', "", "model must be a table of config.json keys"),
        ("[run]", "[run", "must be a readable TOML file"),
    ],
)
def test_a_mistake_is_refused_by_name(tmp_path, old, new, message):
    with pytest.raises(TrainingError) as refused:
        read(tmp_path, MINIMAL.replace(old, new, 1))
    assert message in str(refused.value)


def test_only_dense_models_of_the_newer_family_are_trained(tmp_path):
    config = read(tmp_path, MINIMAL.replace("qwen3_5_text", "qwen3_next"))
    with pytest.raises(TrainingError, match="must be dense and unquantized, model_type qwen3_5_text; got qwen3_next"):
        config.model_config()


def test_a_model_may_be_given_as_a_folder(tmp_path):
    table = 'model_type = "qwen3_5_text"'
    golden = import_rules.ROOT / "tests" / "golden" / "tiny-hybrid"
    assert read(tmp_path, MINIMAL.replace(table, f'folder = "{golden}"')).model_config().hidden_size == 48
    with pytest.raises(TrainingError, match=r"model\.model_type is not known; the nearest key is model\.folder"):
        read(tmp_path, MINIMAL.replace(table, f'folder = "x"\n{table}'))
