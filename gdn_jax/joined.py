"""Projections of one input held as one matrix, for serving: one product where the published layout has two to four.

A decode step reads each weight once and little else, so its products are as fast as few large ones are: one product of
12,352 rows runs at a higher share of the memory's bandwidth than four of 8,192, 4,096 and twice 32 do, in one launch.
Compilers that merge the four themselves copy the matrices in every step.

What is joined can be run, and no longer be written in the published layout or trained.
"""

from flax import nnx

from gdn_jax.attention import GatedAttention
from gdn_jax.gated_delta_net import GatedDeltaNet
from gdn_jax.mlp import DenseMLP
from gdn_jax.model import LanguageModel

_JOINABLE = (GatedAttention, GatedDeltaNet, DenseMLP)


def join_projections(model: LanguageModel) -> None:
    """Join the input projections of every layer of a model, in place.

    Layer by layer, so that no more than one layer's matrices are in memory twice.
    """
    modules = [module for _, module in nnx.iter_modules(model) if isinstance(module, _JOINABLE)]
    for module in modules:
        module.join()
