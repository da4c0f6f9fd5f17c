"""The text files of a made-up checkpoint: a small byte-level BPE tokenizer and chat templates with the real frames.

The templates use the frames, think blocks and tool-call formats of the families with a short tool instruction of
their own. The tokenizer is written as a plain dictionary, so that its bytes do not depend on a library's version.
"""

import json
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Added tokens that skip_special_tokens keeps.
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_NUM_ADDED = len(SPECIAL_TOKENS) + len(TAG_TOKENS)
_NUM_PADDED = 2  # at least so many rows of the embedding have no token, as in the releases
MIN_VOCAB_SIZE = 256 + _NUM_ADDED + _NUM_PADDED

_WORDS = (
    "th", "he", "in", "er", "on", "an", "re", "at", "en", "or", " a", " s", " t", "the", " the", "ing", "ed", "is",
    "it", "user", "system", "assistant", "tool", " to", " and", " of", "\n\n", "hello", " world", "name", "function",
)  # fmt: skip

# Qwen3-Next leaves combining marks out of words, Qwen3.5 takes them in.
_NEXT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_Q35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_alphabet() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary, in the order of ids."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def _merge(symbols: list[str], merges: list[tuple[str, str]]) -> list[str]:
    """Apply merges in order of rank, as BPE does."""
    for left, right in merges:
        i = 0
        while i < len(symbols) - 1:
            if symbols[i : i + 2] == [left, right]:
                symbols = [*symbols[:i], left + right, *symbols[i + 2 :]]
            i += 1
    return symbols


def merge_rules(count: int) -> list[tuple[str, str]]:
    """Return at most `count` merges, which build the words of a short list one after the other."""
    letters = byte_alphabet()
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        symbols = _merge([letters[byte] for byte in word.encode()], merges)
        while len(symbols) > 1:
            merges.append((symbols[0], symbols[1]))
            symbols = _merge(symbols, merges[-1:])
    return merges[:count]


def vocabulary(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]], dict[str, int]]:
    """Return byte and merge tokens, merges, and added tokens with their ids, in all at most `vocab_size` - 2.

    Raises:
        ValueError: the bytes and the added tokens do not fit.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} for a tokenizer, got {vocab_size}: pass text=False"
        )
    merges = merge_rules(vocab_size - MIN_VOCAB_SIZE)
    tokens = [*byte_alphabet().values(), *(left + right for left, right in merges)]
    added = {token: len(tokens) + i for i, token in enumerate(SPECIAL_TOKENS + TAG_TOKENS)}
    return {token: i for i, token in enumerate(tokens)}, merges, added


def readable_ids(vocab_size: int) -> list[int]:
    """Return the ids of tokens made of printable ASCII, blanks and newlines only, added tokens left out."""
    letters = byte_alphabet()
    fine = {letters[byte] for byte in [*range(0x20, 0x7F), 0x0A]}
    return [i for token, i in vocabulary(vocab_size)[0].items() if set(token) <= fine]


def num_tokens(vocab_size: int) -> int:
    """Return how many ids have a token; the rows of the embedding from there on are padding."""
    tokens, _, added = vocabulary(vocab_size)
    return len(tokens) + len(added)


def tokenizer_json(family: str, vocab_size: int) -> str:
    """Return the content of tokenizer.json: NFC, the family's splitting pattern, byte-level BPE."""
    tokens, merges, added = vocabulary(vocab_size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    pattern = _NEXT_PATTERN if family.startswith("next") else _Q35_PATTERN
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": token in SPECIAL_TOKENS} for token, i in added.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": tokens,
            "merges": [list(merge) for merge in merges],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def tokenizer_config(family: str, max_position_embeddings: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; Qwen3-Next keeps its chat template in there."""
    config: dict[str, Any] = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": max_position_embeddings,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    return config | ({"chat_template": NEXT_TEMPLATE} if family.startswith("next") else {})


_TEXT_OF = """\
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content %}{%- for part in content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('messages must not be empty') }}{%- endif %}
{%- set lead = text_of(messages[0].content) if messages[0].role == 'system' else '' %}
"""

_TOOL_RESULT = """\
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + text_of(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""

NEXT_TEMPLATE = (
    _TEXT_OF
    + """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if lead %}{{- lead + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nCall a function with a JSON object in <tool_call></tool_call>.\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + lead + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set text = text_of(message.content) %}
        {{- '<|im_start|>assistant\\n' + text }}
        {%- for call in message.tool_calls or [] %}
            {%- if text or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is string %}{{- arguments }}{%- else %}{{- arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
"""
    + _TOOL_RESULT
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)

Q35_TEMPLATE = (
    _TEXT_OF
    + """\
{%- set lead = lead | trim %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\nYou may call these functions:\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nCall one with <function=NAME> and <parameter=KEY> in <tool_call></tool_call>.' }}
    {%- if lead %}{{- '\\n\\n' + lead }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + lead + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not text_of(message.content).startswith('<tool_response>') %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = text_of(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('a system message must be the first one') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + text + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.query %}{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {%- if loop.first and text %}{{- '\\n\\n' }}{%- elif not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {%- if value is string %}{{- value }}{%- else %}{{- value | tojson }}{%- endif %}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
"""
    + _TOOL_RESULT
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
