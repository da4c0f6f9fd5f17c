"""From an EngineConfig to a running engine: the order in which things are read, planned, said, loaded and compiled.

Files are checked before memory is planned, memory before weights load, weights before anything is compiled: a start
that fails says why as early as it can and leaves nothing behind, no setting of JAX either. Each file is read once, but
for the headers of weight files where an MTP head is looked for.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from gdn_jax.config import ModelConfig
from gdn_jax.joined import join_projections
from gdn_jax.kernel_sizes import check_kernel_sizes
from gdn_jax.kernels.dispatch import Implementation, KernelChoice, choose_kernels, tensor_cores_multiply
from gdn_jax.model import LanguageModel, abstract_model, resolve_dtype
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import StartupError
from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.runner.buckets import make_buckets
from gdn_jax.serving.runner.memory import (
    MemoryPlan,
    MemoryRequest,
    available_host_bytes,
    describe_bytes,
    plan_memory,
)
from gdn_jax.serving.runner.pools import PoolSizes
from gdn_jax.serving.runner.runner import Runner
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.no_tokenizer import NoTokenizer
from gdn_jax.serving.text.tokenizer import GenerationDefaults, Tokenizer
from gdn_jax.shipped import model_folder
from gdn_jax.weights import dummy_weights, has_mtp, load_weights

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30
_CPU_POOL_BYTES = _GIB  # a CPU's memory belongs to others too: pool_memory_gib raises this


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """A running engine and what was read and decided for it."""

    engine: Engine
    model_config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: GenerationDefaults
    memory: MemoryPlan
    kernels: KernelChoice


def build_engine(
    config: EngineConfig, *, show_progress: bool = True, on_compile: Callable[[], None] | None = None
) -> EngineParts:
    """Read, plan, load, compile.

    Args:
        config: the settings.
        show_progress: draw bars on standard error while weights load and steps compile.
        on_compile: called before a step is compiled later on, while requests wait.

    Raises:
        ConfigError: the model's config cannot be used.
        StartupError: tokenizer files are missing or damaged, or memory is too small.
        WeightsError: weight files are damaged or not the model's.
        UnsupportedKernelError: `kernels` names an implementation that cannot run here.
    """
    config = dataclasses.replace(
        config,
        model=model_folder(config.model),
        tokenizer=model_folder(config.tokenizer),
    )
    published = ModelConfig.from_folder(config.model)
    _check_quantization(config, published)
    model_config = _with_head_as_asked(config, published)
    text_folder = Path(config.tokenizer or config.model)
    tokenizer = _read_tokenizer(config, model_config, text_folder)
    chat_template = ChatTemplate.from_folder(text_folder)
    device = jax.devices()[0]
    dtype = str(resolve_dtype(config.dtype, model_config))
    check = partial(
        check_kernel_sizes,
        model_config,
        jnp.dtype(dtype),
        state_dtype=_state_dtype(config, model_config),
        window=1 + config.speculative_tokens,
        block_size=config.block_size,
    )
    kernels = choose_kernels(config.kernels, check)
    memory = plan_memory(model_config, memory_request(config, model_config, device, kernels.implementation))
    _say(config, published, kernels, memory, tokenizer)
    _keep_compiled(config.compile_cache)
    model = _load(config, model_config, dtype, kernels.implementation, show_progress=show_progress)
    engine = _compose(config, model, memory, tokenizer, show_progress=show_progress, on_compile=on_compile)
    return EngineParts(
        engine=engine,
        model_config=model_config,
        tokenizer=tokenizer,
        chat_template=chat_template,
        defaults=tokenizer.generation_defaults,
        memory=memory,
        kernels=kernels,
    )


def _with_head_as_asked(config: EngineConfig, published: ModelConfig) -> ModelConfig:
    """Return the model with its MTP head if it is to draft, else without: weights and pages would lie there unused.

    Raises:
        StartupError: it is to draft and has no head.
    """
    if config.speculative_tokens == 0:
        return dataclasses.replace(published, num_mtp_layers=0)
    remedy = "set speculative_tokens to 0, or use a release that has its MTP tensors"
    if published.num_mtp_layers == 0:
        raise StartupError(
            f"speculative_tokens must be 0 for a model without an MTP head; got {config.speculative_tokens}, and the "
            f"config in {config.model} names no MTP layer; {remedy}"
        )
    if config.load_format != "dummy" and not has_mtp(config.model):
        raise StartupError(
            f"speculative_tokens must be 0 for weights without an MTP head; got {config.speculative_tokens}, and the "
            f"weight files in {config.model} hold no tensor mtp.*; {remedy}"
        )
    return published


def _read_tokenizer(config: EngineConfig, model: ModelConfig, folder: Path) -> Tokenizer:
    """Read the tokenizer; random weights can do without one, so that a config.json is enough to try out a size."""
    if config.load_format == "dummy" and not config.tokenizer and not (folder / "tokenizer.json").exists():
        return NoTokenizer(folder, model.vocab_size, config_eos=model.eos_token_ids)
    return Tokenizer(folder, model.vocab_size, config_eos=model.eos_token_ids, model_folder=config.model)


def _check_quantization(config: EngineConfig, model: ModelConfig) -> None:
    if config.quantization == "fp8" and model.quantization is None:
        raise StartupError(
            f"quantization must be what the model's weights are stored in; got 'fp8', and {config.model} is not "
            "quantized; leave quantization out, or use the FP8 release"
        )


def _keep_compiled(folder: str) -> None:
    """Let the compiler keep its results on disk, unless the process has chosen a place already."""
    if folder and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def memory_request(
    config: EngineConfig,
    model: ModelConfig,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm] - jax binds the name at run time
    implementation: Implementation,
) -> MemoryRequest:
    """Return what a config asks of a device's memory; logs what the share is of.

    Raises:
        StartupError: the device does not say how much memory there is, and the config neither.
    """
    total = limit = 0
    pool = int(config.pool_memory_gib * _GIB)
    if device.platform == "cpu":
        pool = pool or min(_CPU_POOL_BYTES, available_host_bytes() // 2)
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        if not limit and not pool:
            raise StartupError(
                f"{device.device_kind} does not say how much memory JAX may use of it; set pool_memory_gib"
            )
        total = int(limit * config.gpu_memory_utilization)
        if limit:
            _LOG.info(
                "memory: %s to use, gpu_memory_utilization (%g) of the %s that JAX may use of the device; the variable "
                "XLA_CLIENT_MEM_FRACTION sets that",
                describe_bytes(total),
                config.gpu_memory_utilization,
                describe_bytes(limit),
            )
    return MemoryRequest(
        total_bytes=total,
        pool_bytes=pool,
        dtype=str(resolve_dtype(config.dtype, model)),
        state_dtype=_state_dtype(config, model),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        window=1 + config.speculative_tokens,
        block_size=config.block_size,
        state_share=config.state_memory_share,
        num_blocks=config.num_blocks,
        num_slots=config.num_state_slots,
        implementation=implementation,
        device_bytes=limit,
    )


def _state_dtype(config: EngineConfig, model: ModelConfig) -> str:
    return model.state_dtype if config.state_dtype == "auto" else config.state_dtype


def _say(
    config: EngineConfig, model: ModelConfig, kernels: KernelChoice, memory: MemoryPlan, tokenizer: Tokenizer
) -> None:
    """Log what was chosen and why, before anything long begins."""
    kind, dtype = jax.devices()[0].device_kind, resolve_dtype(config.dtype, model)
    _LOG.info("model: %s, %s, %d layers, on %s", model.model_type, dtype, model.num_layers, kind)
    if config.speculative_tokens:
        _LOG.info("speculation: the MTP head drafts %d tokens a step", config.speculative_tokens)
    elif model.num_mtp_layers:
        _LOG.info("speculation: off; the MTP head is left out (speculative_tokens=3 would use it)")
    if isinstance(tokenizer, NoTokenizer):
        _LOG.info("tokenizer: none in %s; prompts must be token ids, and answers have no text", config.model)
    if not_applied := tokenizer.generation_defaults.not_applied:
        _LOG.warning(
            "generation_config.json asks for %s, which is not applied: answers may differ from the model's usual ones",
            ", ".join(not_applied),
        )
    level = logging.WARNING if kernels.is_fallback else logging.INFO
    _LOG.log(level, "kernels: %s (%s)", kernels.implementation, kernels.reason)
    if kernels.implementation is Implementation.MOSAIC:
        if tensor_cores_multiply(dtype):
            parts = "GDN layers and attention are Mosaic kernels; in plain JAX: grouped products"
        else:
            parts = "GDN layers are Mosaic kernels in decode; in plain JAX: prefill, attention, grouped products"
        _LOG.info("kernels: with %s activations %s", dtype, parts)
    mode = f"{config.prefix_cache}, states every {config.state_interval} tokens"
    _LOG.info("prefix cache: %s", mode if config.prefix_cache == "all" else config.prefix_cache)
    for line in memory.lines():
        _LOG.info("memory: %s", line)


def _load(
    config: EngineConfig, model_config: ModelConfig, dtype: str, implementation: Implementation, *, show_progress: bool
) -> LanguageModel:
    """Load a model's weights, and shape them for serving."""
    abstract = abstract_model(model_config, dtype=jnp.dtype(dtype), implementation=implementation)
    if config.load_format == "dummy":
        model = dummy_weights(abstract, config.seed)
    else:
        hidden = None if show_progress else True  # None: where standard error is no terminal, the log lines tell
        with tqdm(desc="loading weights", unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
            model = load_weights(abstract, model_config, config.model, progress=_advance(bar))
    join_projections(model)
    return model


def _advance(bar: "tqdm[Any]") -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def _compose(
    config: EngineConfig,
    model: LanguageModel,
    memory: MemoryPlan,
    tokenizer: Tokenizer,
    *,
    show_progress: bool,
    on_compile: Callable[[], None] | None,
) -> Engine:
    buckets = make_buckets(
        budget=min(config.max_num_batched_tokens, -(-memory.max_model_len // 64) * 64 * memory.max_num_seqs),
        max_num_seqs=memory.max_num_seqs,
        max_model_len=memory.max_model_len,
        block_size=config.block_size,
        deterministic=config.deterministic,
    )
    sizes = PoolSizes(
        num_blocks=memory.num_blocks,
        num_slots=memory.num_slots,
        num_lanes=memory.max_num_seqs,
        window=1 + config.speculative_tokens,
        block_size=config.block_size,
        max_blocks=buckets.table_blocks[-1],
        state_dtype=_state_dtype(config, model.config),
    )
    # Where plain JAX runs, attention has loops that the host of a GPU waits for anyway. Results that depend on nothing
    # else come from one program, whatever the neighbours ask for.
    by_demand = model.implementation is Implementation.MOSAIC and not config.deterministic
    runner = Runner(
        model,
        sizes,
        buckets,
        num_valid_tokens=tokenizer.num_tokens,
        steps_by_demand=by_demand,
        on_compile=on_compile,
    )
    if config.warm_up is True or (config.warm_up == "auto" and jax.default_backend() != "cpu"):
        with tqdm(desc="compiling", unit="step", disable=None if show_progress else True, leave=False) as bar:
            runner.warm_up(_advance(bar))
    limits = Limits(
        num_blocks=memory.num_blocks,
        num_slots=memory.num_slots,
        num_lanes=memory.max_num_seqs,
        budget=config.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
        num_drafts=config.speculative_tokens,
        cache_key=_cache_key(config, model),
    )
    placement = Placement(
        mode=CacheMode(config.prefix_cache), block_size=config.block_size, state_interval=config.state_interval
    )
    scheduler = Scheduler(limits, placement)
    return Engine(
        scheduler,
        runner,
        tokenizer=tokenizer,
        end_token_ids=tokenizer.end_token_ids,
        auditor=runner.make_auditor() if config.audit else None,
        async_scheduling=config.async_scheduling,
    )


def _cache_key(config: EngineConfig, model: LanguageModel) -> bytes:
    """Name what a cached state depends on beside tokens, so that no other model's blocks are ever found."""
    parts: Sequence[object] = (config.model, config.load_format, config.seed, model.dtype, model.config)
    return hashlib.sha256(repr(parts).encode()).digest()
