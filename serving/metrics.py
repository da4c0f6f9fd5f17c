"""Names of the metrics that the server exposes: what each is, and vLLM's name where it has the same thing.

Names are those of the exposition, so a counter's ends in `_total`. Values of `ENGINE` are fields of the engine's
statistics, read when somebody asks; those of `SERVER` the server counts itself. Standard library only.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "gdn_jax_"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix.
        kind: of Prometheus.
        text: what it counts, with the unit.
        field: of the engine's statistics; empty: the server's own.
        vllm: vLLM's name for the same thing, with its suffix; empty: it has none.
        label: for a field that is a tuple: one value for each place in it, and its name.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    field: str = ""
    vllm: str = ""
    label: str = ""


ENGINE = (
    Metric(
        name="requests_running",
        kind="gauge",
        text="Completions that hold a lane of the engine.",
        field="running",
        vllm="vllm:num_requests_running",
    ),
    Metric(
        name="requests_waiting",
        kind="gauge",
        text="Completions that wait for the engine.",
        field="waiting",
        vllm="vllm:num_requests_waiting",
    ),
    Metric(name="kv_blocks", kind="gauge", text="KV blocks in all.", field="blocks"),
    Metric(name="kv_blocks_used", kind="gauge", text="KV blocks held by completions.", field="blocks_used"),
    Metric(name="state_slots", kind="gauge", text="State slots in all.", field="slots"),
    Metric(name="state_slots_used", kind="gauge", text="State slots held by completions.", field="slots_used"),
    Metric(name="checkpoints", kind="gauge", text="Checkpoints that a prefix can hit.", field="checkpoints"),
    Metric(
        name="prefix_cache_queried_tokens_total",
        kind="counter",
        text="Tokens looked up in the prefix cache.",
        field="queried_tokens",
        vllm="vllm:prefix_cache_queries_total",
    ),
    Metric(
        name="prefix_cache_hit_tokens_total",
        kind="counter",
        text="Tokens that came from the prefix cache.",
        field="hit_tokens",
        vllm="vllm:prefix_cache_hits_total",
    ),
    Metric(
        name="gap_tokens_total", kind="counter", text="Known tokens computed again for their state.", field="gap_tokens"
    ),
    Metric(name="prefilled_tokens_total", kind="counter", text="Tokens computed in prefill.", field="prefilled_tokens"),
    Metric(name="checkpoint_saves_total", kind="counter", text="Checkpoints published.", field="saves"),
    Metric(
        name="checkpoint_saves_skipped_total",
        kind="counter",
        text="Checkpoints that found no slot.",
        field="saves_skipped",
    ),
    Metric(name="checkpoint_evictions_total", kind="counter", text="Checkpoints evicted.", field="evictions"),
    Metric(
        name="preemptions_total",
        kind="counter",
        text="Completions that gave everything back and started again.",
        field="preemptions",
        vllm="vllm:num_preemptions_total",
    ),
    Metric(name="steps_total", kind="counter", text="Steps run.", field="steps"),
    Metric(name="failed_steps_total", kind="counter", text="Steps that the device failed.", field="failed_steps"),
    Metric(name="compilations_total", kind="counter", text="Steps compiled.", field="compilations"),
    Metric(
        name="verified_rows_total",
        kind="counter",
        text="Rows of steps that verified drafts.",
        field="verified_rows",
        vllm="vllm:spec_decode_num_drafts_total",
    ),
    Metric(
        name="drafted_tokens_total",
        kind="counter",
        text="Draft tokens verified.",
        field="drafted_tokens",
        vllm="vllm:spec_decode_num_draft_tokens_total",
    ),
    Metric(
        name="accepted_tokens_total",
        kind="counter",
        text="Draft tokens that stood and were kept.",
        field="accepted_tokens",
        vllm="vllm:spec_decode_num_accepted_tokens_total",
    ),
    Metric(
        name="accepted_tokens_per_position_total",
        kind="counter",
        text="Draft tokens that stood and were kept, by place in their window, from 0.",
        field="accepted_by_position",
        vllm="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        label="position",
    ),
)

KV_USAGE = Metric(
    name="kv_usage_ratio",
    kind="gauge",
    text="Share of the KV blocks that completions hold, 0 to 1.",
    vllm="vllm:kv_cache_usage_perc",
)
PROMPT_TOKENS = Metric(
    name="prompt_tokens_total",
    kind="counter",
    text="Prompt tokens of requests that got a first token.",
    vllm="vllm:prompt_tokens_total",
)
GENERATION_TOKENS = Metric(
    name="generation_tokens_total", kind="counter", text="Tokens generated.", vllm="vllm:generation_tokens_total"
)
COMPLETIONS = Metric(
    name="completions_total",
    kind="counter",
    text="Completions that ended, by finished_reason: stop, length, abort, error.",
    vllm="vllm:request_success_total",
)
HTTP_REQUESTS = Metric(name="http_requests_total", kind="counter", text="HTTP requests answered, by path and status.")
LIVE_REQUESTS = Metric(name="http_requests_live", kind="gauge", text="Generation requests not yet answered in full.")
FIRST_TOKEN = Metric(
    name="time_to_first_token_seconds",
    kind="histogram",
    text="From a request's arrival to its first token.",
    vllm="vllm:time_to_first_token_seconds",
)
INTER_TOKEN = Metric(
    name="inter_token_latency_seconds",
    kind="histogram",
    text="Between one completion's tokens.",
    vllm="vllm:inter_token_latency_seconds",
)
LATENCY = Metric(
    name="request_latency_seconds",
    kind="histogram",
    text="From a request's arrival to its end.",
    vllm="vllm:e2e_request_latency_seconds",
)
REQUEST_PROMPT = Metric(
    name="request_prompt_tokens",
    kind="histogram",
    text="Prompt tokens of one request.",
    vllm="vllm:request_prompt_tokens",
)
REQUEST_GENERATION = Metric(
    name="request_generation_tokens",
    kind="histogram",
    text="Tokens generated for one request.",
    vllm="vllm:request_generation_tokens",
)
SERVER = (
    KV_USAGE, PROMPT_TOKENS, GENERATION_TOKENS, COMPLETIONS, HTTP_REQUESTS, LIVE_REQUESTS,
    FIRST_TOKEN, INTER_TOKEN, LATENCY, REQUEST_PROMPT, REQUEST_GENERATION,
)  # fmt: skip
