"""What training makes small: the next token by the model, and by its MTP head, which feeds itself as it will.

    L = CE(model) + mtp_weight * mean over depths of ((1 - soft) CE(head, token) + soft CE(head, model))

A draft stands when it is the token that the model itself draws, so a share of the head's loss asks for the model's own
distribution (which gets no gradient from that) and not for the text's token. All is float32 from the logits on.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.decoder import Decoder
from gdn_jax.kernels.documents import same_document
from gdn_jax.model import LanguageModel
from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.errors import require


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Weights of the parts.

    Attributes:
        mtp_weight: of the head's loss beside the model's; 0 leaves the head out.
        mtp_depth: how often the head feeds itself in training, at least 1; tokens it will draft.
        mtp_soft_share: share of the head's loss that asks for the model's distribution, 0..1.
        mtp_row_share: share of the rows that the head learns from, above 0; its depths cost almost what the model does.
    """

    mtp_weight: float = 0.3
    mtp_depth: int = 3
    mtp_soft_share: float = 0.5
    mtp_row_share: float = 1.0

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.mtp_weight >= 0, "loss.mtp_weight", "be at least 0", self.mtp_weight)
        require(1 <= self.mtp_depth <= 8, "loss.mtp_depth", "be in 1..8", self.mtp_depth)
        require(0 < self.mtp_row_share <= 1, "loss.mtp_row_share", "be in (0, 1]", self.mtp_row_share)
        require(0 <= self.mtp_soft_share <= 1, "loss.mtp_soft_share", "be in [0, 1]", self.mtp_soft_share)


def training_loss(
    model: LanguageModel, batch: TrainBatch, options: LossOptions
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the loss of a batch of packed documents and its parts, in nats per target token.

    Args:
        model: with parameters in the dtype to compute in.
        batch: the documents; each token but the first of a document is the target of the one before.
        options: weights of the parts; the head's are left out where the model has none.

    Returns:
        The loss, and `next_token`, `mtp_1` ... `mtp_<depth>` (of the text's tokens) and `num_targets`.
    """
    decoder = model.decoder
    hidden = decoder.forward(batch.token_ids, batch.document)
    target, counts = _targets(batch)
    next_token, _ = _cross_entropy(decoder, hidden, None, target, counts)
    metrics = {"next_token": next_token, "num_targets": counts.sum()}
    if model.mtp is None or options.mtp_weight == 0.0:
        return next_token, metrics

    num_rows = max(1, round(options.mtp_row_share * hidden.shape[0]))
    batch, hidden, target, counts = jax.tree.map(lambda x: x[:num_rows], (batch, hidden, target, counts))
    head_loss = jnp.zeros((), jnp.float32)
    drafts = model.mtp.forward(decoder.embed_tokens(batch.token_ids), hidden, batch.document, depth=options.mtp_depth)
    for depth, output in enumerate(drafts, start=1):
        known = counts & same_document(batch.document, depth)
        hard, soft = _cross_entropy(decoder, output, jax.lax.stop_gradient(hidden), target, known)
        head_loss += (1.0 - options.mtp_soft_share) * hard + options.mtp_soft_share * soft
        metrics[f"mtp_{depth}"] = hard
    return next_token + options.mtp_weight / options.mtp_depth * head_loss, metrics


def _targets(batch: TrainBatch) -> tuple[Int[Array, "rows T"], Bool[Array, "rows T"]]:
    """Return the token after each one, and whether it is of the same document."""
    return jnp.roll(batch.token_ids, -1, axis=1), jnp.diff(batch.document, axis=1, append=-1) == 0


def _cross_entropy(
    decoder: Decoder,
    hidden: Float[Array, "rows T H"],
    teacher: Float[Array, "rows T H"] | None,
    target: Int[Array, "rows T"],
    counts: Bool[Array, "rows T"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean cross entropy with the targets, and with what the teacher's hidden vectors say (0 without)."""

    @jax.checkpoint  # logits are made again in the backward pass: kept, those of all depths would be most of the memory
    def sums(hidden: Array, teacher: Array | None) -> tuple[Array, Array]:
        logprobs = jax.nn.log_softmax(decoder.logits(hidden))
        hard = -jnp.take_along_axis(logprobs, target[..., None], axis=-1)[..., 0]
        if teacher is None:
            soft = jnp.zeros_like(hard)
        else:
            wanted = jax.lax.stop_gradient(jax.nn.softmax(decoder.logits(teacher)))
            soft = -(wanted * logprobs).sum(axis=-1)
        return jnp.where(counts, hard, 0.0).sum(), jnp.where(counts, soft, 0.0).sum()

    number = jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    hard, soft = sums(hidden, teacher)
    return hard / number, soft / number
