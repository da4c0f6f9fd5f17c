"""Requests as msgspec types: what may be sent, and of which type. `openapi.py` publishes them.

Every field may be null, which is the same as leaving it out. A field that is not listed is refused by name, as are the
fields of `NEUTRAL` at any value that asks for something. Ranges are `SamplingParams`' to check.
"""

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream brings beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _NoOps(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that are accepted and change nothing here; `NO_OPS` says why."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    add_special_tokens: Any = None


class _Refused(_NoOps, kw_only=True, forbid_unknown_fields=True):
    """Fields that others offer and this engine does not; `NEUTRAL` has the values that ask for nothing."""

    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    request_id: Any = None
    return_token_ids: Any = None


class SamplingFields(_Refused, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    detokenize: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    best_of: Any = None
    prompt_embeds: Any = None


class TemplateFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a conversation becomes a prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    include_reasoning: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    echo: Any = None
    documents: Any = None
    chat_template: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Any = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# Accepted, and without effect.
NO_OPS: dict[str, str] = {
    "user": "nothing is kept by user",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "safety_identifier": "nothing is kept by user",
    "prompt_cache_key": "prefixes are found by content; cache_salt keeps them apart",
    "prompt_cache_retention": "prefixes stay as long as there is room",
    "add_special_tokens": "the tokenizers of these models add none",
    "parallel_tool_calls": "tool calls come as text",
    "prediction": "a hint about speed alone",
}

# Refused at any other value than these; null is always one.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "request_id": (),
    "return_token_ids": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
}
REMEDIES: dict[str, str] = {
    "request_id": "send the header x-request-id",
    "reasoning_effort": "use chat_template_kwargs, e.g. enable_thinking",
    "chat_template": "the model's own template is used",
    "best_of": "use n, and choose among the choices",
}
