"""ModelConfig: sizes, layer pattern and dtypes of one text model, complete and checked once.

It is built from the config.json of a published model (`config_json.py` knows that file's spellings and refusals) and
holds nothing about serving. Sizes in parameters and bytes are derived in `sizes.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gdn_jax.config_json import LINEAR_ATTENTION, read_fields, read_folder
from gdn_jax.config_quantization import Fp8Quantization
from gdn_jax.config_rope import YarnConfig
from gdn_jax.errors import ConfigError, UnsupportedModelError

__all__ = ["Fp8Quantization", "ModelConfig", "YarnConfig"]

# Fields that must reach a minimum in every model, and the published key where its name differs.
_MINIMA = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_layers": 1,
    "num_attention_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
    "num_linear_key_heads": 1,
    "num_linear_value_heads": 1,
    "linear_key_dim": 1,
    "linear_value_dim": 1,
    "conv_kernel": 2,
    "max_position_embeddings": 1,
}
_MOE_FIELDS = ("num_experts", "num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size")
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads",
    "num_linear_key_heads": "linear_num_key_heads",
    "num_linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
    "num_experts_per_token": "num_experts_per_tok",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One text model. Hashable, so that it can be a static argument of a compiled function.

    Attributes:
        model_type: "qwen3_next", "qwen3_5_text" or "qwen3_5_moe_text".
        vocab_size: V, rows of the embedding; padded above the tokenizer's size.
        hidden_size: H.
        num_layers: decoder layers, MTP not counted.
        layer_types: "linear_attention" (GDN) or "full_attention", per decoder layer.
        num_attention_heads: Hq.
        num_kv_heads: Hkv; divides Hq.
        head_dim: D, of full attention; not H / Hq.
        num_linear_key_heads: Nk, of GDN.
        num_linear_value_heads: Nv; a multiple of Nk.
        linear_key_dim: dk.
        linear_value_dim: dv.
        conv_kernel: K, tokens that the short convolution sees.
        rotary_dim: R, leading channels of each attention head that rotate; even.
        rope_theta: base of the rotation.
        yarn: context extension; None without it.
        rms_norm_eps: of every RMS norm.
        intermediate_size: width of a dense feed-forward layer; 0 where the config names none.
        is_moe_layer: whether the feed-forward part is a mixture of experts, per decoder layer.
        mtp_is_moe: the same for the MTP layer.
        num_experts: routed experts; this and the next three are 0 where the family has none.
        num_experts_per_token: routed experts chosen for a token.
        moe_intermediate_size: width of a routed expert.
        shared_expert_intermediate_size: width of the shared expert.
        norm_topk_prob: whether the chosen router weights are scaled to sum to 1.
        tie_word_embeddings: whether the output matrix is the embedding.
        max_position_embeddings: native context limit, in tokens; see `context_length`.
        num_mtp_layers: 0 or 1. Qwen3-Next says nothing of it: 1 until the weights turn out to hold none.
        dtype: storage dtype by name: "bfloat16", "float16" or "float32".
        state_dtype: dtype of the recurrent state at rest, by the same names.
        quantization: layout of quantized weights; None where none are.
        eos_token_ids: end tokens that config.json names; generation_config.json's win over them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    num_linear_key_heads: int
    num_linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    rotary_dim: int
    rope_theta: float
    yarn: YarnConfig | None
    rms_norm_eps: float
    intermediate_size: int
    is_moe_layer: tuple[bool, ...]
    mtp_is_moe: bool
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_mtp_layers: int
    dtype: str
    state_dtype: str
    quantization: Fp8Quantization | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse sizes that contradict each other, and more than one MTP layer."""
        for field, least in _MINIMA.items():
            if getattr(self, field) < least:
                raise ConfigError(f"{_key(field)} must be at least {least}; got {getattr(self, field)}; correct it")
        for field in ("layer_types", "is_moe_layer"):
            if len(getattr(self, field)) != self.num_layers:
                raise ConfigError(
                    f"{field} must have one entry per layer; got {len(getattr(self, field))} for num_hidden_layers "
                    f"{self.num_layers}; correct one of the two"
                )
        self._check_divides("num_kv_heads", "num_attention_heads")
        self._check_divides("num_linear_key_heads", "num_linear_value_heads")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                "partial_rotary_factor must rotate an even number of a head's channels, 2 to head_dim; "
                f"got {self.rotary_dim} of {self.head_dim}; correct one of the two"
            )
        if self.num_mtp_layers not in (0, 1):
            raise UnsupportedModelError(
                f"mtp_num_hidden_layers must be 0 or 1, as in every release; got {self.num_mtp_layers}; "
                "use a model with one MTP layer or none"
            )
        self._check_feed_forward()

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> "ModelConfig":
        """Read a published config: flat, or with the text model nested under `text_config`.

        Keys that do not bear on the text model are ignored.

        Args:
            raw: the content of config.json.

        Raises:
            ConfigError: a value has the wrong type, or values contradict each other.
            UnsupportedModelError: a family or setting that is known or suspected to compute something else.
        """
        # The reader gives each field its type; a typed mapping would repeat the list of fields for the checker alone.
        return cls(**read_fields(raw))  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json of a model folder.

        Args:
            folder: a local folder in the published layout; names on a hub are not looked up.

        Raises:
            ConfigError: no such folder, no readable config.json in it, or see `from_dict`.
            UnsupportedModelError: the folder holds an adapter, or see `from_dict`.
        """
        return cls.from_dict(read_folder(folder))

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution, C = 2 Nk dk + Nv dv."""
        keys = self.num_linear_key_heads * self.linear_key_dim
        return 2 * keys + self.num_linear_value_heads * self.linear_value_dim

    @property
    def conv_window(self) -> int:
        """Tokens of convolution input kept between calls, K - 1."""
        return self.conv_kernel - 1

    @property
    def num_gdn_layers(self) -> int:
        """Decoder layers with a recurrent state."""
        return self.layer_types.count(LINEAR_ATTENTION)

    @property
    def num_attention_layers(self) -> int:
        """Decoder layers with keys and values, MTP not counted."""
        return self.num_layers - self.num_gdn_layers

    @property
    def value_heads_per_key_head(self) -> int:
        """Value heads that share one key head in GDN, r = Nv / Nk."""
        return self.num_linear_value_heads // self.num_linear_key_heads

    @property
    def context_length(self) -> int:
        """Tokens that the rotary embedding covers: the native limit, or YaRN's where that is more."""
        if self.yarn is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.yarn.factor * self.yarn.original_max_position))

    def _check_divides(self, divisor: str, multiple: str) -> None:
        if getattr(self, multiple) % getattr(self, divisor):
            raise ConfigError(
                f"{_key(divisor)} must divide {_key(multiple)}; got {getattr(self, divisor)} and "
                f"{getattr(self, multiple)}; correct one of the two"
            )

    def _check_feed_forward(self) -> None:
        has_mtp = self.num_mtp_layers > 0
        kinds = {*self.is_moe_layer, *([self.mtp_is_moe] if has_mtp else [])}
        if False in kinds and self.intermediate_size < 1:
            raise ConfigError(
                f"intermediate_size must be at least 1 where a layer is dense; got {self.intermediate_size}; correct it"
            )
        if True not in kinds:
            return
        for field in _MOE_FIELDS:
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"{_key(field)} must be at least 1 where a layer has experts; "
                    f"got {getattr(self, field)}; correct it"
                )
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok must be at most num_experts; got {self.num_experts_per_token} of "
                f"{self.num_experts}; correct one of the two"
            )


def _key(field: str) -> str:
    """Return the published key that a field comes from."""
    return _KEYS.get(field, field)
