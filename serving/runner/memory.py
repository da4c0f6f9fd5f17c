"""How memory is split between weights, activations, KV blocks and state slots; decided before weights load.

A running request holds one state slot and the blocks of its tokens; what it leaves in the cache is blocks and a few
checkpoints. So the pools' memory is shared out by what a request of middling length needs of either.
"""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation, tensor_cores_multiply
from gdn_jax.kernels.paged_attention.prefill_tiles import MOST_SPLIT_TOKENS
from gdn_jax.serving.core.errors import StartupError
from gdn_jax.serving.runner.activations import advance_bytes, mosaic_prefill_bytes, prefill_bytes, score_bytes
from gdn_jax.serving.runner.adjust import history_bytes_per_lane
from gdn_jax.serving.runner.buckets import Buckets, make_buckets
from gdn_jax.sizes import kv_bytes_per_token, mtp_kv_bytes_per_token, parameter_count, state_bytes_per_slot

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MEAN_TOKENS = 4096  # a conversation of middling length, for the split only
_CHECKPOINTS_PER_REQUEST = 4  # prompt end, turn border, turn end, junction
_SPARE = 4  # pools never exceed what this many full sets of the longest requests could fill


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What is asked of the memory; zeros mean "what fits".

    Attributes:
        total_bytes: memory for weights, activations and pools; 0 without a limit on those (then pool_bytes counts).
        device_bytes: all that could be used of the device, of which total_bytes is a share; 0: not known.
        pool_bytes: memory for the pools; 0: what weights and activations leave of total_bytes.
        dtype: of weights, activations and KV, by name.
        state_dtype: of recurrent states at rest, by name.
        max_model_len: most tokens of one sequence; 0: the model's limit, or what fits.
        max_num_seqs: running requests.
        budget: prefill tokens in one step.
        window: tokens of a replay window.
        block_size: tokens per block.
        state_share: share of the pools for state slots; 0: by the rule above.
        num_blocks: KV blocks, the null block not counted; 0: what fits.
        num_slots: state slots, the null slot not counted; 0: what fits.
        implementation: which kernels run.
    """

    total_bytes: int
    pool_bytes: int
    dtype: str
    state_dtype: str
    max_model_len: int
    max_num_seqs: int
    budget: int
    window: int
    block_size: int
    state_share: float = 0.0
    num_blocks: int = 0
    num_slots: int = 0
    implementation: Implementation = Implementation.JAX
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Needs:
    """What a model needs for a request, and what is there for its pools, in bytes.

    Attributes:
        weights: of all parameters.
        activations: of the largest step.
        block: of one KV block.
        slot: of one state slot.
        lane: of one lane.
        shortest_tokens: of the one sequence that has to fit.
        least: of the pools for that sequence, the null block and the null slot included.
        pool: there for the pools; below 0 where weights and activations do not fit themselves.
    """

    weights: int
    activations: int
    block: int
    slot: int
    lane: int
    shortest_tokens: int
    least: int
    pool: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The split; the null block and the null slot are counted in `num_blocks` and `num_slots`."""

    weight_bytes: int
    activation_bytes: int
    block_bytes: int
    slot_bytes: int
    lane_bytes: int
    num_blocks: int
    num_slots: int
    max_num_seqs: int
    max_model_len: int
    block_size: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks, slots and lanes."""
        return (
            self.num_blocks * self.block_bytes + self.num_slots * self.slot_bytes + self.max_num_seqs * self.lane_bytes
        )

    @property
    def num_longest(self) -> int:
        """How many sequences of the maximum length fit at once."""
        blocks = -(-self.max_model_len // self.block_size)
        return min((self.num_blocks - 1) // blocks, self.num_slots - 1, self.max_num_seqs)

    def how_to_take_longer(self, context_length: int) -> str:
        """Return the rest of a remedy, what would let longer sequences in; the model takes `context_length`."""
        if self.max_model_len >= context_length:
            return ": that is the model's own limit"
        if self.max_model_len >= (self.num_blocks - 1) * self.block_size:
            return ", or give the KV pool more memory, which max_model_len fills"
        return ", or raise max_model_len"

    def lines(self) -> list[str]:
        """Describe the split for people."""
        blocks = (self.num_blocks - 1) * self.block_size
        checkpoints = ", the rest are checkpoints" if self.num_slots - 1 > self.max_num_seqs else ""
        return [
            f"weights {describe_bytes(self.weight_bytes)}, activations up to {describe_bytes(self.activation_bytes)}",
            f"KV: {self.num_blocks - 1} blocks of {self.block_size} tokens ({blocks} tokens), "
            f"{describe_bytes(self.block_bytes)} each, {describe_bytes(self.num_blocks * self.block_bytes)} in all",
            f"states: {self.num_slots - 1} slots, {describe_bytes(self.slot_bytes)} each, "
            f"{describe_bytes(self.num_slots * self.slot_bytes)} in all; {self.max_num_seqs} may run"
            f"{checkpoints}",
            f"replay windows and token counts: {describe_bytes(self.lane_bytes)} for each of {self.max_num_seqs} lanes",
            f"{self.num_longest} sequences of {self.max_model_len} tokens fit at once",
        ]


def describe_bytes(size: int) -> str:
    """Return a size for people: a number and its unit."""
    for unit, scale in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def plan_memory(model: ModelConfig, request: MemoryRequest) -> MemoryPlan:
    """Split the memory, clamping what need not be and refusing what cannot be.

    Raises:
        StartupError: weights and activations leave too little for even one sequence, or for the pools asked for.
    """
    limit = request.max_model_len or model.context_length
    if limit > model.context_length:
        raise StartupError(f"max_model_len must be at most the model's {model.context_length}; got {limit}; lower it")
    needs = _needs(model, request)
    if needs.pool < needs.least:
        raise StartupError(_too_little(model, request, needs))
    pool, block, slot, lane = needs.pool, needs.block, needs.slot, needs.lane
    seqs = _clamp_seqs(request, pool, slot + lane, needs.least - slot - lane)
    slots, blocks = _split(request, pool - seqs * lane, slot, block, seqs, limit)
    asked = blocks * block + slots * slot + seqs * lane
    if asked > pool and (request.num_blocks or request.num_slots):
        raise StartupError(
            f"{blocks - 1} blocks and {slots - 1} state slots need {describe_bytes(asked)} and {describe_bytes(pool)} "
            "are there: lower num_blocks or num_state_slots, or give more memory"
        )
    fits = (blocks - 1) * request.block_size
    if fits < limit and request.max_model_len and request.num_blocks:
        raise StartupError(
            f"one sequence of {limit} tokens needs {-(-limit // request.block_size)} blocks; got "
            f"num_blocks={request.num_blocks}: raise num_blocks or leave it out, or lower max_model_len"
        )
    if fits < limit and request.max_model_len:
        raise StartupError(
            f"one sequence of {limit} tokens needs {-(-limit // request.block_size)} blocks and {blocks - 1} fit: "
            "lower max_model_len, state_memory_share or max_num_seqs, or give more memory"
        )
    if fits < limit:
        _LOG.warning("max_model_len is %d: the model's %d tokens do not fit the KV pool", fits, limit)
    return MemoryPlan(
        weight_bytes=needs.weights,
        activation_bytes=needs.activations,
        block_bytes=block,
        slot_bytes=slot,
        lane_bytes=lane,
        num_blocks=blocks,
        num_slots=slots,
        max_num_seqs=seqs,
        max_model_len=min(limit, fits),
        block_size=request.block_size,
    )


def _needs(model: ModelConfig, request: MemoryRequest) -> _Needs:
    item = _ITEM_BYTES[request.dtype]
    weights = sum(parameter_count(model)) * item
    activations = activation_bytes(model, request)
    block = request.block_size * (kv_bytes_per_token(model, request.dtype) + _mtp_bytes(model, request.dtype))
    slot = state_bytes_per_slot(model, request.state_dtype, request.dtype) + model.hidden_size * item
    lane = request.window * lane_bytes_per_token(model, request.dtype) + history_bytes_per_lane(model.vocab_size)
    shortest = request.max_model_len or min(model.context_length, request.block_size)
    return _Needs(
        weights=weights,
        activations=activations,
        block=block,
        slot=slot,
        lane=lane,
        shortest_tokens=shortest,
        least=-(-shortest // request.block_size) * block + block + 2 * slot + lane,
        pool=request.pool_bytes or request.total_bytes - weights - activations,
    )


def _too_little(model: ModelConfig, request: MemoryRequest, needs: _Needs) -> str:
    """Say what does not fit, and what would help."""
    *first, last = _remedies(model, request)
    remedies = f"{', '.join(first)}, or {last}" if first else last
    total = describe_bytes(request.total_bytes)
    if not request.pool_bytes and needs.weights >= request.total_bytes:
        whole = f" of {describe_bytes(request.device_bytes)}" if request.device_bytes else ""
        return (
            f"weights must fit what may be used of the device, {total}{whole}; held in {request.dtype} they need "
            f"{describe_bytes(needs.weights)}: {remedies}"
        )
    left = "are there for the pools" if request.pool_bytes else f"of {total} are left"
    return (
        f"one sequence of {needs.shortest_tokens} tokens needs {describe_bytes(needs.least)} beside "
        f"{describe_bytes(needs.weights)} of weights and {describe_bytes(needs.activations)} of activations; "
        f"{describe_bytes(max(needs.pool, 0))} {left}: {remedies}"
    )


def _remedies(model: ModelConfig, request: MemoryRequest) -> list[str]:
    """Return what to do where a sequence does not fit: what would do alone, each tried here, then what always would."""
    tries = [
        ("lower max_num_batched_tokens", replace(request, budget=request.block_size)),
        ("lower max_num_seqs", replace(request, max_num_seqs=1)),
    ]
    if request.max_model_len:
        tries.insert(0, ("lower max_model_len", replace(request, max_model_len=request.block_size)))
    if request.device_bytes:
        tries.append(("raise gpu_memory_utilization", replace(request, total_bytes=request.device_bytes)))
    if request.dtype == "float32":
        tries.append(("set dtype to bfloat16", replace(request, dtype="bfloat16")))
    helpful = [words for words, changed in tries if (needs := _needs(model, changed)).pool >= needs.least]
    always = "raise pool_memory_gib" if request.pool_bytes else "use a smaller model or a device with more memory"
    return [*helpful, always]


def _clamp_seqs(request: MemoryRequest, pool: int, per_seq: int, rest: int) -> int:
    """Return how many requests may run: each needs a slot and a lane, and one of them all its blocks."""
    fit = max((pool - rest) // per_seq, 1)
    if request.num_slots:
        fit = min(fit, request.num_slots)
    if request.max_num_seqs > fit:
        _LOG.warning("max_num_seqs is %d instead of %d: no more state slots fit", fit, request.max_num_seqs)
    return min(request.max_num_seqs, fit)


def _split(request: MemoryRequest, pool: int, slot: int, block: int, seqs: int, limit: int) -> tuple[int, int]:
    """Return slots and blocks, null ones included."""
    longest = -(-limit // request.block_size)
    most_blocks = _SPARE * seqs * longest
    kept = 1  # blocks that no slot may take the place of: one, or those of a sequence whose length was asked for
    if request.state_share:
        slots = int(pool * request.state_share) // slot
    else:
        mean = min(limit, _MEAN_TOKENS)
        per_request = _CHECKPOINTS_PER_REQUEST * slot + -(-mean // request.block_size) * block
        free = max(pool - (seqs + 1) * slot - block, 0)
        slots = seqs + 1 + _CHECKPOINTS_PER_REQUEST * free // per_request
        kept = longest if request.max_model_len else 1
    slots = max(min(slots, seqs + 1 + most_blocks, (pool - (kept + 1) * block) // slot), seqs + 1)
    if request.num_slots:
        slots = request.num_slots + 1
    if request.num_blocks:
        return slots, request.num_blocks + 1
    # In a model of recurrent layers alone a block is a name and costs nothing.
    blocks = min((pool - slots * slot) // block, most_blocks + 1) if block else most_blocks + 1
    return slots, max(blocks, 2)


def _mtp_bytes(model: ModelConfig, dtype: str) -> int:
    return mtp_kv_bytes_per_token(model, dtype) if model.num_mtp_layers else 0


def lane_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Return what a replay window keeps of one token: conv input, k, v, g, beta per layer, and a hidden vector."""
    item = _ITEM_BYTES[dtype]
    k_and_v = model.num_linear_key_heads * model.linear_key_dim + model.num_linear_value_heads * model.linear_value_dim
    per_layer = (model.conv_channels + k_and_v) * item + 2 * model.num_linear_value_heads * 4
    return model.num_gdn_layers * per_layer + model.hidden_size * item


def activation_bytes(model: ModelConfig, request: MemoryRequest) -> int:
    """Return an upper estimate of what the largest step needs beside weights and pools; see `activations.py`."""
    item = _ITEM_BYTES[request.dtype]
    buckets = make_buckets(
        budget=request.budget,
        max_num_seqs=request.max_num_seqs,
        max_model_len=request.max_model_len or model.context_length,
        block_size=request.block_size,
        deterministic=False,
    )
    tokens, rows = buckets.prefill[-1]
    if request.implementation is Implementation.MOSAIC and tensor_cores_multiply(jnp.dtype(request.dtype)):
        prefill = _most_of_prefills(model, item, buckets, request.block_size)
    else:
        prefill = prefill_bytes(model, item, num_tokens=tokens, num_rows=rows)
    return max(
        prefill,
        score_bytes(model, item, num_tokens=tokens),
        advance_bytes(model, item, num_rows=request.max_num_seqs, window=request.window),
    )


def _most_of_prefills(model: ModelConfig, item_bytes: int, buckets: Buckets, block_size: int) -> int:
    """Return the most that a prefill call on Mosaic kernels needs, of all that may come to be compiled.

    What fits decides how many rows and tokens a call has in the end, and one of fewer may split its attention, which
    takes more memory.
    """
    tokens, rows = buckets.prefill[-1]
    few = range(block_size, min(tokens, MOST_SPLIT_TOKENS) + 1, block_size)
    return max(
        mosaic_prefill_bytes(
            model, item_bytes, num_tokens=count, num_rows=num_rows, num_blocks=buckets.table_blocks[-1]
        )
        for count in (*few, tokens)
        for num_rows in range(1, rows + 1)
    )


def available_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that new work may take without swapping, the reclaimable file cache included.

    That is MemAvailable where the system says it (Linux since 3.14); elsewhere half of the physical memory.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024  # the file says kB and means KiB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
