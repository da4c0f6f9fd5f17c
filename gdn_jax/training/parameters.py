"""Parameters of a run: float32 arrays by published tensor name, and the model that is computed with them.

Arrays have the shapes of the model's parameters; files may hold another view (see `gdn_jax.tensor_names.stored_form`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import LanguageModel, abstract_model
from gdn_jax.tensor_names import ParameterPath, stored_form

Params = dict[str, Float[Array, "..."]]

_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each array belongs in the model, and in what dtype it takes part. Hashable: static in a compiled step.

    Attributes:
        graph: the model without its parameters.
        leaves: (tensor name, parameter path, shape, dtype name) of each parameter.
    """

    graph: nnx.GraphDef[LanguageModel]
    leaves: tuple[tuple[str, ParameterPath, tuple[int, ...], str], ...]

    def model(self, params: Params) -> LanguageModel:
        """Return the model of parameters, each cast to its compute dtype."""
        variables = {path: nnx.Param(params[name].astype(dtype)) for name, path, _, dtype in self.leaves}
        return nnx.merge(self.graph, nnx.from_flat_state(cast("dict[Any, nnx.Param]", variables)))


def make_layout(config: ModelConfig, compute_dtype: str) -> Layout:
    """Return the layout of a model whose activations have `compute_dtype`; A_log, dt_bias, GDN norm stay float32."""
    model = abstract_model(config, dtype=jnp.dtype(compute_dtype), implementation=Implementation.JAX)
    graph, state = nnx.split(model)
    leaves = tuple(
        (stored_form(path, param.shape)[0], path, tuple(param.shape), jnp.dtype(param.dtype).name)
        for path, param in _variables(state)
    )
    return Layout(graph=graph, leaves=leaves)


@partial(jax.jit, static_argnums=0)
def initial_parameters(config: ModelConfig, seed: int | Int[Array, ""]) -> Params:
    """Draw float32 parameters; equal seeds, equal parameters.

    They are the model's own initial values, but the matrices that write into the residual stream are smaller by
    (2 L)^-0.5: the stream sums 2 L of their outputs, and so keeps the size of one whatever the depth (Radford et al.
    2019). The MTP head counts as a stack of one layer.
    """
    model = LanguageModel(
        config, dtype=jnp.dtype(jnp.float32), implementation=Implementation.JAX, rngs=nnx.Rngs(jax.random.key(seed))
    )
    params = {}
    for path, param in _variables(nnx.split(model)[1]):
        name = stored_form(path, param.shape)[0]
        layers = 1 if path[0] == "mtp" else config.num_layers
        params[name] = param[...] * ((2 * layers) ** -0.5 if name.endswith(_RESIDUAL) else 1.0)
    return params


def _variables(state: nnx.State) -> list[tuple[ParameterPath, nnx.Param]]:
    """Return the parameters of a state with their paths; flax says of a path's parts only that they can be compared."""
    return cast("list[tuple[ParameterPath, nnx.Param]]", list(nnx.to_flat_state(state)))
