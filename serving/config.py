"""EngineConfig: everything a person may set about an engine, checked once, complete from then on.

The Python API, the command line and the server all fill this one class. vLLM's argument names are accepted where they
mean the same (`from_arguments`). Standard library only: what needs the model or the device is decided in `memory.py`.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Number
from reprlib import repr as short_repr
from typing import Literal, cast

PrefixCache = Literal["none", "align", "all"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["auto", "fp8"]
Kernels = Literal["auto", "reference", "jax", "mosaic"]
WarmUp = bool | Literal["auto"]
MAX_SPECULATIVE_TOKENS = 8
DEFAULT_SPECULATIVE_TOKENS = 3  # where speculation is asked for without a number, as the releases' own settings have it
BLOCK_GRID = 64  # the kernels' chunk: block sizes are multiples of it


class SettingError(ValueError):
    """A setting has a wrong type or value; the message has its name, the rule and the value."""


class UnknownSettingError(SettingError, TypeError):
    """A setting that there is none of; also a TypeError, as for any other Python call."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: folder with config.json, weights and tokenizer, or the name of a model that came with the package: pico.
        tokenizer: folder with tokenizer files and chat template; empty: the model's. End tokens and sampling defaults
            are the model folder's in any case.
        dtype: of weights and activations; auto: what the model's config names.
        load_format: auto and safetensors read weight files; dummy makes random weights.
        quantization: what the weights must be stored in; auto: whatever the model's config says.
        seed: draws the seeds of requests that bring none, and dummy weights.
        kernels: which kernels run; auto: Pallas kernels (mosaic) on a Hopper GPU that can run the model's sizes and so
            many drafts, else plain JAX (jax). Start-up logs the choice.
        max_model_len: most tokens of one sequence; 0: the model's own limit, or less if less fits.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most prefill tokens in one step; decode rows always run.
        speculative_tokens: drafts that the MTP head makes in a step, 0 to 8; with 0 the head is not loaded. The tokens
            are the same whatever the number.
        prefix_cache: where states are saved for later requests: none, align or all.
        state_interval: tokens between the extra saves of `all`; a multiple of block_size.
        block_size: tokens per block, the grain of prefix hits.
        state_dtype: of recurrent states at rest; auto: what the model's config names.
        gpu_memory_utilization: share, for weights, activations and pools, of the memory that JAX may use of an
            accelerator. That is 75 % of the card, or what the variable XLA_CLIENT_MEM_FRACTION says; the command line
            sets 95 % unless it is set. Start-up logs the share in bytes.
        pool_memory_gib: memory for the pools; 0: what gpu_memory_utilization leaves, on a CPU at most 1 GiB.
        state_memory_share: share of the pools' memory that goes to state slots; 0: chosen from the other settings.
        num_blocks: KV blocks; 0: what fits.
        num_state_slots: state slots for running requests and checkpoints; 0: what fits.
        async_scheduling: hand a step to the device before the one before it has come back, where that can be planned
            (no drafts, nobody to admit, no prompt to compute), so that the device does not wait for the host.
        deterministic: one padded size per phase, so that results are equal bits whatever else runs.
        audit: check the cache against fresh recomputation after every step; slow, for tests.
        warm_up: compile every step before the first request; auto: on an accelerator, and not on a CPU. With Pallas
            kernels each size of a decode step is compiled three times, for what rows may ask of sampling.
        compile_cache: folder that keeps compiled steps for the next start; empty: none is kept.
    """

    model: str
    tokenizer: str = ""
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    seed: int = 0
    kernels: Kernels = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    speculative_tokens: int = 0
    prefix_cache: PrefixCache = "all"
    state_interval: int = 512
    block_size: int = 64
    state_dtype: Dtype = "auto"
    gpu_memory_utilization: float = 0.9
    pool_memory_gib: float = 0.0
    state_memory_share: float = 0.0
    num_blocks: int = 0
    num_state_slots: int = 0
    async_scheduling: bool = True
    deterministic: bool = False
    audit: bool = False
    warm_up: WarmUp = "auto"
    compile_cache: str = "~/.cache/gdn-jax"

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            SettingError: a value has the wrong type or lies outside its range; the message has the rule and the remedy.
        """
        for name in _FOLDERS:
            if not isinstance(getattr(self, name), str):
                raise SettingError(f"{name} must be a str, the path of a folder; got {getattr(self, name)!r}")
        for name, choices in _CHOICES.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:
                raise SettingError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name, low in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SettingError(f"{name} must be an integer of at least {low}; got {value!r}")
        drafts = self.speculative_tokens
        if isinstance(drafts, bool) or not isinstance(drafts, int) or not 0 <= drafts <= MAX_SPECULATIVE_TOKENS:
            raise SettingError(
                f"speculative_tokens (num_speculative_tokens of speculative_config) must be an integer in "
                f"0..{MAX_SPECULATIVE_TOKENS}; got {drafts!r}; published settings use {DEFAULT_SPECULATIVE_TOKENS}"
            )
        if self.max_model_len == 1:
            raise SettingError("max_model_len must be 0 or at least 2, a prompt's token and an answer's; got 1")
        for name in ("async_scheduling", "deterministic", "audit"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"{name} must be True or False; got {getattr(self, name)!r}")
        if not isinstance(self.warm_up, bool | str) or self.warm_up not in (True, False, "auto"):
            raise SettingError(f"warm_up must be True, False or 'auto'; got {self.warm_up!r}")
        for name in ("gpu_memory_utilization", "state_memory_share"):
            self._check_number(name, 1.0)
        self._check_number("pool_memory_gib", _MOST_GIB)
        if 0 < self.pool_memory_gib < 2.0**-30:
            raise SettingError(f"pool_memory_gib must be 0 or at least one byte; got {self.pool_memory_gib!r}")
        if self.gpu_memory_utilization == 0:
            raise SettingError("gpu_memory_utilization must be above 0; got 0")
        self._check_grid()

    def _check_number(self, name: str, most: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise SettingError(f"{name} must be a finite number in 0..{most}; got {value!r}")

    def _check_grid(self) -> None:
        if self.block_size != BLOCK_GRID:
            raise SettingError(
                f"block_size must be {BLOCK_GRID}, the kernels' chunk and the grain of hits; got {self.block_size}"
            )
        if self.state_interval % self.block_size:
            raise SettingError(
                f"state_interval must be a multiple of block_size ({self.block_size}); got {self.state_interval}"
            )
        if self.max_num_batched_tokens < self.block_size:
            raise SettingError(
                f"max_num_batched_tokens must be at least one block ({self.block_size}); "
                f"got {self.max_num_batched_tokens}"
            )

    def arguments(self) -> dict[str, object]:
        """Return every setting but the model, as keyword arguments for `LLM`."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "model"}

    @classmethod
    def from_arguments(cls, model: str | os.PathLike[str], arguments: Mapping[str, object]) -> "EngineConfig":
        """Make a config from keyword arguments, vLLM's names included; None stands for the default of any of them.

        A folder may be a path object too.

        Raises:
            SettingError: a value is out of range, a vLLM setting asks for what this engine does not do, or two settings
                contradict each other.
            UnknownSettingError: an unknown keyword; the message names the closest known one.
        """
        known = {field.name for field in fields(cls)}
        settings: dict[str, object] = {}
        sources: dict[str, str] = {}  # by the setting's name, the argument that set it
        for name, value in arguments.items():
            if name not in known and name not in _FROM_VLLM:
                near = get_close_matches(name, [*known, *_FROM_VLLM], 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
                raise UnknownSettingError(f"LLM() has no argument {name!r}{hint}")
            if value is None:
                continue
            for ours, asked in ({name: value} if name in known else _FROM_VLLM[name](value)).items():
                if ours in settings and repr(settings[ours]) != repr(asked):
                    raise _contradiction(sources[ours], name, arguments)
                settings[ours], sources[ours] = asked, name
        if arguments.get("enable_prefix_caching") is True and settings.get("prefix_cache") == "none":
            raise _contradiction("enable_prefix_caching", sources["prefix_cache"], arguments)
        for name in _FOLDERS:
            if isinstance(path := settings.get(name), os.PathLike):
                settings[name] = os.fspath(cast("os.PathLike[str]", path))
        folder = os.fspath(model) if isinstance(model, os.PathLike) else model
        return cls(model=folder, **settings)  # pyright: ignore[reportArgumentType] - __post_init__ checks each


_MOST_GIB = 2.0**30  # above any machine's; counts of bytes stay finite
_FOLDERS = ("model", "tokenizer", "compile_cache")
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "load_format": ("auto", "safetensors", "dummy"),
    "quantization": ("auto", "fp8"),
    "kernels": ("auto", "reference", "jax", "mosaic"),
    "prefix_cache": ("none", "align", "all"),
    "state_dtype": ("auto", "bfloat16", "float16", "float32"),
}
_INTEGERS: dict[str, int] = {
    "seed": -(2**63),
    "max_model_len": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "state_interval": 1,
    "block_size": 1,
    "num_blocks": 0,
    "num_state_slots": 0,
}


def _contradiction(first: str, second: str, arguments: Mapping[str, object]) -> SettingError:
    return SettingError(
        f"{first} and {second} must not contradict each other; got {arguments[first]!r} and {arguments[second]!r}; "
        "leave one out"
    )


def _only(name: str, remedy: str, *accepted: object) -> Callable[[object], dict[str, object]]:
    """Accept a setting at values that ask for nothing this engine lacks; None always does."""

    def convert(value: object) -> dict[str, object]:
        # Only these are compared: an array's comparison has no truth value.
        if not isinstance(value, str | Number) or value not in accepted:
            raise SettingError(f"{name} must be {' or '.join(map(repr, [*accepted, None]))}; got {value!r}: {remedy}")
        return {}

    return convert


def _renamed(name: str) -> Callable[[object], dict[str, object]]:
    return lambda value: {name: value}


def _switch(name: str, at: object, setting: dict[str, object]) -> Callable[[object], dict[str, object]]:
    """Accept True and False; one of them, `at`, stands for a setting of ours, the other for the default."""

    def convert(value: object) -> dict[str, object]:
        if not isinstance(value, bool):
            raise SettingError(f"{name} must be True, False or None; got {value!r}")
        return setting if value is at else {}

    return convert


_MTP_METHODS = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp")  # vLLM's names for a model's own head
_SPECULATIVE_KEYS = ("method", "num_speculative_tokens", "model", "draft_tensor_parallel_size")


def _speculative(value: object) -> dict[str, object]:
    """Take the number of drafts from vLLM's dictionary, or its JSON text; the method is the model's own head."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SettingError(
                f"speculative_config must be a dict or JSON of one; got {short_repr(value)}: {error}"
            ) from error
    if not isinstance(value, Mapping):
        raise SettingError(f"speculative_config must be a dict or JSON of one; got {short_repr(value)}")
    asked = {key: one for key, one in cast("Mapping[str, object]", value).items() if one is not None}
    if asked.get("method", "mtp") not in _MTP_METHODS or "model" in asked:
        raise SettingError(
            f"speculative_config must have the method 'mtp' and no model; got {short_repr(asked)}; the model's own "
            "head is the only drafter: use {'method': 'mtp', 'num_speculative_tokens': 3}"
        )
    if unknown := [key for key in asked if key not in _SPECULATIVE_KEYS]:
        raise SettingError(
            f"speculative_config must have no keys but {', '.join(_SPECULATIVE_KEYS)}; got {unknown[0]!r}; leave it out"
        )
    if asked.get("draft_tensor_parallel_size", 1) != 1:
        raise SettingError(
            "draft_tensor_parallel_size must be 1; "
            f"got {short_repr(asked['draft_tensor_parallel_size'])}; one device runs the model"
        )
    if not asked:
        return {}
    return {"speculative_tokens": asked.get("num_speculative_tokens", DEFAULT_SPECULATIVE_TOKENS)}


# vLLM's names: either another name of ours, or a setting at the only values that mean what this engine does.
_FROM_VLLM: dict[str, Callable[[object], dict[str, object]]] = {
    "enable_prefix_caching": _switch("enable_prefix_caching", False, {"prefix_cache": "none"}),
    "mamba_cache_mode": _renamed("prefix_cache"),
    "mamba_block_size": _renamed("state_interval"),
    "mamba_ssm_cache_dtype": _renamed("state_dtype"),
    "num_gpu_blocks_override": _renamed("num_blocks"),
    "enforce_eager": _switch("enforce_eager", True, {"warm_up": False}),
    "tensor_parallel_size": _only("tensor_parallel_size", "one device runs the model", 1),
    "pipeline_parallel_size": _only("pipeline_parallel_size", "one device runs the model", 1),
    "data_parallel_size": _only("data_parallel_size", "start one engine per replica", 1),
    "enable_chunked_prefill": _only("enable_chunked_prefill", "prefill is always chunked", True),
    "speculative_config": _speculative,
    "kv_cache_dtype": _only("kv_cache_dtype", "KV pages have the model's dtype", "auto"),
    "tokenizer_mode": _only("tokenizer_mode", "tokenizer.json is always used", "auto"),
    "trust_remote_code": _only("trust_remote_code", "no code of a checkpoint ever runs", True, False),
    "disable_log_stats": _only("disable_log_stats", "statistics are read with LLM.stats()", True, False),
    "cpu_offload_gb": _only("cpu_offload_gb", "weights stay on the device", 0),
    "swap_space": _only("swap_space", "preempted requests are recomputed, not swapped", 0, 4),
    "revision": _only("revision", "models are local folders"),
    "download_dir": _only("download_dir", "models are local folders"),
}
