"""TrainConfig: all that a training run is told, complete and checked once. `config_file.py` reads it from TOML."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gdn_jax.config import ModelConfig
from gdn_jax.config_json import read_folder
from gdn_jax.training.errors import TrainingError, require
from gdn_jax.training.loss import LossOptions

_DTYPES = ("bfloat16", "float32")
_CHUNK = 64  # rows are whole chunks of the delta rule


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it is drawn.

    Attributes:
        folders: each holds train/DOMAIN[-N].jsonl.xz and held_out/DOMAIN[-N].jsonl.xz.
        weights: share of the tokens drawn from each domain; they need not sum to 1.
        sequence_length: T, tokens of a row; a multiple of 64.
        held_out_tokens: most tokens of each domain that an evaluation reads.
        cache: folder in which tokenized text is kept; empty for none.
    """

    folders: tuple[str, ...]
    weights: Mapping[str, float]
    sequence_length: int = 2048
    held_out_tokens: int = 65536
    cache: str = ""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(len(self.folders) > 0, "data.folders", "name at least one folder", self.folders)
        require(len(self.weights) > 0, "data.weights", "name at least one domain", self.weights)
        for domain, weight in self.weights.items():
            require(0 < weight < 1e6, f"data.weights.{domain}", "be above 0 (leave the domain out instead)", weight)
        length = self.sequence_length
        require(length >= _CHUNK and length % _CHUNK == 0, "data.sequence_length", "be a multiple of 64", length)
        require(self.held_out_tokens >= 1, "data.held_out_tokens", "be at least 1", self.held_out_tokens)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay.

    Attributes:
        peak_learning_rate: after the warm-up.
        warmup_steps: over which it rises from 0.
        total_steps: of the whole run.
        final_share: of the peak, at the end.
        weight_decay: of matrices; norms, gates, A_log, dt_bias and convolutions have none.
        beta1: decay of the first moment.
        beta2: decay of the second one.
        eps: added to the root of the second moment.
        clip_norm: largest global norm of a gradient.
    """

    peak_learning_rate: float = 2e-3
    warmup_steps: int = 200
    total_steps: int = 3000
    final_share: float = 0.02
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("peak_learning_rate", "eps", "clip_norm"):
            require(getattr(self, name) > 0, f"optimizer.{name}", "be above 0", getattr(self, name))
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", "be in [0, 1)", getattr(self, name))
        require(0 <= self.final_share <= 1, "optimizer.final_share", "be in [0, 1]", self.final_share)
        require(self.weight_decay >= 0, "optimizer.weight_decay", "be at least 0", self.weight_decay)
        require(self.total_steps >= 1, "optimizer.total_steps", "be at least 1", self.total_steps)
        fits = 0 <= self.warmup_steps < self.total_steps
        require(fits, "optimizer.warmup_steps", f"be in 0..total_steps - 1 ({self.total_steps - 1})", self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Rows of one optimizer step.

    Attributes:
        rows: in all.
        micro_batches: parts that are computed one after the other and summed, to save memory; divides `rows`.
    """

    rows: int = 128
    micro_batches: int = 1

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.rows >= 1, "batch.rows", "be at least 1", self.rows)
        fits = self.micro_batches >= 1 and self.rows % self.micro_batches == 0
        require(fits, "batch.micro_batches", f"divide batch.rows ({self.rows})", self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run goes on, and what it leaves.

    Attributes:
        out: folder for checkpoints, plot and the final model.
        seed: of initial values and of the order of the text.
        evaluate_every: steps between evaluations on held-out text; also after the last step.
        checkpoint_every: steps between checkpoints; 0 for none by steps. One is written whenever the run ends.
        checkpoint_seconds: seconds between checkpoints; 0 for none by time.
        keep: newest checkpoints that stay.
        compute_dtype: of activations and matrix products, "bfloat16" or "float32"; parameters are held in float32.
        time_limit_s: seconds after which the run ends with a checkpoint; 0 for no limit.
        max_bad_steps: steps in a row without finite loss and gradient that end the run.
        shard_mib: most MiB of one weight file; 0 for one file whatever its size.
    """

    out: str
    seed: int = 0
    evaluate_every: int = 250
    checkpoint_every: int = 1000
    checkpoint_seconds: float = 0.0
    keep: int = 2
    compute_dtype: str = "bfloat16"
    time_limit_s: float = 0.0
    max_bad_steps: int = 20
    shard_mib: float = 15.0

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.out != "", "run.out", "name a folder", self.out)
        require(0 <= self.seed < 2**31, "run.seed", "be in 0..2^31 - 1", self.seed)
        for name in ("evaluate_every", "keep", "max_bad_steps"):
            require(getattr(self, name) >= 1, f"run.{name}", "be at least 1", getattr(self, name))
        for name in ("checkpoint_every", "checkpoint_seconds", "time_limit_s", "shard_mib"):
            require(getattr(self, name) >= 0, f"run.{name}", "be at least 0", getattr(self, name))
        require(self.compute_dtype in _DTYPES, "run.compute_dtype", f"be {' or '.join(_DTYPES)}", self.compute_dtype)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
        model: published keys of config.json, or `folder` alone: a folder that holds such a file.
        tokenizer: folder with tokenizer.json and the files that the final model is to have beside it.
    """

    model: Mapping[str, object]
    tokenizer: str
    data: DataConfig
    run: RunConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossOptions = field(default_factory=LossOptions)

    def model_config(self) -> ModelConfig:
        """Return the model's sizes.

        Raises:
            ConfigError: see `ModelConfig.from_dict`.
            TrainingError: a family that is not trained here.
        """
        table = read_folder(Path(str(self.model["folder"]))) if "folder" in self.model else self.model
        config = ModelConfig.from_dict(table)
        if config.model_type != "qwen3_5_text" or config.quantization is not None:
            raise TrainingError(
                "model must be dense and unquantized, model_type qwen3_5_text; got "
                f"{config.model_type}{' with FP8 weights' if config.quantization else ''}; choose such a config"
            )
        return config
