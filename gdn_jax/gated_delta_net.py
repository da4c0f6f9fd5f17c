"""Gated DeltaNet layer: projections, short convolution, gates, delta rule, gated norm, output projection.

    u = x W_qkv^T;  [q|k|v] = silu(conv(u));  g = -exp(A_log) softplus(x W_a^T + dt_bias);  beta = sigmoid(x W_b^T)
    o = delta_rule(l2norm(q) dk^-0.5, l2norm(k), v, g, beta);  y = gated_norm(o, x W_z^T) W_o^T

The equations are those of Gated Delta Networks (Yang et al. 2024, arXiv:2412.06464, eq. 10) with the parameter names of
the published weights. The layer owns no state: slots and replay windows come in as arguments and go out as results.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.causal_conv1d import causal_conv1d_forward
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.documents import same_document
from gdn_jax.kernels.gated_delta import DeltaInputs, delta_inputs, gdn_forward
from gdn_jax.kernels.gated_rms_norm import gated_rms_norm
from gdn_jax.kernels.gdn_mixer import MixerTokens, MixerWeights, RecurrentState, gdn_mixer_advance, gdn_mixer_prefill
from gdn_jax.linear import JoinedLinear, Linear
from gdn_jax.state import AdvanceBatch, PrefillBatch

_Projections = tuple[Array, Array, Array, Array]  # raw, z, b, a


class GatedDeltaNet(nnx.Module):
    """One GDN mixer.

    A_log, dt_bias and the output norm's weight stay float32 whatever the model's dtype: the decay is an exponential of
    them.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation, rngs: nnx.Rngs
    ) -> None:
        """Create the parameters of one layer.

        Args:
            config: the model.
            dtype: projections and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        hidden, num_v = config.hidden_size, config.num_linear_value_heads
        value_width = num_v * config.linear_value_dim
        self.num_key_heads = config.num_linear_key_heads
        self.key_dim = config.linear_key_dim
        self.num_value_heads = num_v
        self.value_dim = config.linear_value_dim
        self.num_channels = config.conv_channels
        self.eps = config.rms_norm_eps
        self.implementation = implementation
        self.in_proj_qkv = Linear(hidden, config.conv_channels, dtype=dtype, rngs=rngs)
        self.in_proj_z = Linear(hidden, value_width, dtype=dtype, rngs=rngs)
        self.in_proj_b = Linear(hidden, num_v, dtype=dtype, rngs=rngs)
        self.in_proj_a = Linear(hidden, num_v, dtype=dtype, rngs=rngs)
        conv_shape = (config.conv_channels, config.conv_kernel)
        bound = config.conv_kernel**-0.5
        self.conv_weight = nnx.Param(nnx.initializers.uniform(2 * bound)(rngs.params(), conv_shape, dtype) - bound)
        # Decays spread over heads: A in 1..16, dt_bias such that softplus gives time steps of 1e-3 to 1e-1.
        self.a_log = nnx.Param(jnp.log(1.0 + 15.0 * rngs.params.uniform((num_v,), jnp.float32)))
        step = jnp.exp(jnp.log(1e-3) + jnp.log(100.0) * rngs.params.uniform((num_v,), jnp.float32))
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))  # the inverse of softplus
        self.norm_weight = nnx.Param(jnp.ones((config.linear_value_dim,), jnp.float32))
        self.out_proj = Linear(value_width, hidden, dtype=dtype, rngs=rngs)
        self.joined: JoinedLinear | None = nnx.data(None)
        self.taps: nnx.Param | None = nnx.data(None)

    def join(self) -> None:
        """Hold the four input projections as one matrix, and the taps as decode reads them: see `joined.py`."""
        self.taps = nnx.Param(self.conv_weight[...].T)
        del self.conv_weight
        parts = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        self.joined = JoinedLinear(parts, multiple_of=self.value_dim)
        del self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a

    def prefill(
        self, x: Float[Array, "T H"], state: RecurrentState, batch: PrefillBatch
    ) -> tuple[Float[Array, "T H"], RecurrentState]:
        """Run packed spans from and into state slots; replay windows are not touched."""
        mixed, state = gdn_mixer_prefill(
            self._tokens(x), self._weights(), batch.rows, state, eps=self.eps, implementation=self.implementation
        )
        return self.out_proj(mixed.reshape(*x.shape[:-1], -1)), state

    def advance(
        self, x: Float[Array, "rows T H"], state: RecurrentState, batch: AdvanceBatch
    ) -> tuple[Float[Array, "rows T H"], RecurrentState]:
        """Fold each lane's replay window into its slot, run the new tokens, and keep them as the next replay window."""
        mixed, state = gdn_mixer_advance(
            self._tokens(x),
            self._weights(),
            batch.rows,
            batch.lane,
            state,
            eps=self.eps,
            implementation=self.implementation,
        )
        return self.out_proj(mixed.reshape(*x.shape[:-1], -1)), state

    def forward(self, x: Float[Array, "rows T H"], document: Int[Array, "rows T"]) -> Float[Array, "rows T H"]:
        """Run rows of whole documents without slots: what training differentiates."""
        raw, z, b, a = self._project(x)
        mixed = causal_conv1d_forward(raw, self._taps().T, document, implementation=self.implementation)
        q, inputs = self._delta_inputs(mixed, a, b)
        is_first = ~same_document(document, 1)
        return self._output(gdn_forward(q, inputs, is_first, implementation=self.implementation), z)

    def _weights(self) -> MixerWeights:
        return MixerWeights(
            taps=self._taps(), a_log=self.a_log[...], dt_bias=self.dt_bias[...], norm=self.norm_weight[...]
        )

    def _taps(self) -> Float[Array, "K C"]:
        return self.conv_weight[...].T if self.taps is None else self.taps[...]

    def _project(self, x: Float[Array, "*tokens H"]) -> _Projections:
        """Return raw, z, b and a of each token."""
        if self.joined is not None:
            tokens = self._tokens(x)
            return tokens.raw, tokens.z, tokens.b, tokens.a
        z = self.in_proj_z(x).reshape(*x.shape[:-1], self.num_value_heads, self.value_dim)
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)

    def _tokens(self, x: Float[Array, "*tokens H"]) -> MixerTokens:
        """Return the same side by side, which only the mixer needs: to put them so is work that a gradient repeats."""
        if self.joined is None:
            return MixerTokens.of(*self._project(x))
        return MixerTokens(
            packed=self.joined.product(x),
            num_channels=self.num_channels,
            num_heads=self.num_value_heads,
            width=self.value_dim,
        )

    def _delta_inputs(
        self, mixed: Float[Array, "*tokens C"], a: Float[Array, "*tokens Nv"], b: Float[Array, "*tokens Nv"]
    ) -> tuple[Float[Array, "*tokens Nk dk"], DeltaInputs]:
        return delta_inputs(
            mixed,
            a,
            b,
            self.a_log[...],
            self.dt_bias[...],
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
        )

    def _output(
        self, out: Float[Array, "*tokens Nv dv"], z: Float[Array, "*tokens Nv dv"]
    ) -> Float[Array, "*tokens H"]:
        normed = gated_rms_norm(out, z, self.norm_weight[...], eps=self.eps)
        return self.out_proj(normed.reshape(*out.shape[:-2], -1))
