"""The cross entropy under upstream's name, from torch's functions: on any device."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flash_attn._errors import check_wide, explained, shown


def _check(logits: Tensor, labels: Tensor) -> None:
    check_wide("logits", logits, (2,), "(batch, vocabulary)")
    is_index = labels.dtype in (torch.int32, torch.int64) and labels.layout == torch.strided
    if not is_index or labels.shape != logits.shape[:1] or labels.device != logits.device:
        raise RuntimeError(
            f"flash_attn: labels: expected int32 or int64 and shape {tuple(logits.shape[:1])} on"
            f" {logits.device} as logits has, got {shown(labels)} on {labels.device}"
        )


@explained(of_torch=True)
def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: object = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, in fp32 (fp64 for fp64 logits). With x = logit_scale · logits:

        loss = (1 - ε) (lse(x) - x[label]) + ε (lse(x) - mean(x)) + lse_square_scale · lse(x)²

    Arguments:
        logits: (batch, vocabulary), any float dtype.
        labels: int64 or int32 (batch).
        precomputed_lse, inplace_backward: not needed; part of upstream's signature, where they save
            time and memory.
        label_smoothing: ε.
        lse_square_scale: weight of the z-loss (PaLM).
        ignore_index: rows with this label have loss 0 and no gradient.
        process_group: None, the whole vocabulary on one device; others raise NotImplementedError.

    Returns: losses (batch), and the z-loss in them (batch), which has no gradient.
    """
    if process_group is not None:
        raise NotImplementedError(
            "flash_attn: process_group: a vocabulary split over processes is not supported,"
            f" expected None, got {type(process_group).__name__}"
        )
    _check(logits, labels)
    labels = labels.long()
    scores = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(
        scores,
        labels,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if lse_square_scale == 0.0:
        return losses, torch.zeros_like(losses)
    z_losses = lse_square_scale * scores.logsumexp(-1).square()
    z_losses = z_losses.masked_fill(labels == ignore_index, 0.0)
    return losses + z_losses, z_losses.detach()
