"""The cross entropy as a module, under upstream's name."""

from torch import Tensor, nn

from flash_attn._errors import explained, flag, shown
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss


class CrossEntropyLoss(nn.Module):
    """cross_entropy_loss of rows, reduced.

    Arguments (the others: see cross_entropy_loss):
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        return_z_loss: also return the z-loss, reduced in the same way; for logging, no gradient.
    """

    @explained()
    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: object = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(reduction, str) or reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(
                f'flash_attn: reduction: expected "mean", "none" or "sum", got {shown(reduction)}'
            )
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = flag("return_z_loss", return_z_loss)

    @explained({"logits": "input", "labels": "target"})
    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input (batch, vocabulary), target (batch) → the loss, and with return_z_loss its part."""
        parts = cross_entropy_loss(
            input,
            target,
            precomputed_lse=precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction != "none":
            count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            parts = tuple(part.sum() / count for part in parts)
        return parts if self.return_z_loss else parts[0]
