"""gdn-jax: an inference engine in JAX for Gated-DeltaNet hybrid language models.

This file stays light: names load on first use, and nothing here imports jax. The table below is the one place where the
model package names `serving`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdn_jax.model import LanguageModel, load_model
    from gdn_jax.serving.async_llm import AsyncLLM
    from gdn_jax.serving.llm import LLM
    from gdn_jax.serving.outputs import CompletionOutput, RequestOutput
    from gdn_jax.serving.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_LAZY = {
    "LLM": "gdn_jax.serving.llm",
    "AsyncLLM": "gdn_jax.serving.async_llm",
    "CompletionOutput": "gdn_jax.serving.outputs",
    "LanguageModel": "gdn_jax.model",
    "RequestOutput": "gdn_jax.serving.outputs",
    "RequestOutputKind": "gdn_jax.serving.sampling_params",
    "SamplingParams": "gdn_jax.serving.sampling_params",
    "load_model": "gdn_jax.model",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LanguageModel",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
    "load_model",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'gdn_jax' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_LAZY})
