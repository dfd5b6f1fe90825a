"""The older names of upstream's RMS norm; flash_attn.ops.triton.layer_norm has the newer ones."""

import torch
from torch import Tensor, nn

from flash_attn._errors import check_floats, check_wide, explained
from flash_attn.ops.triton.layer_norm import rms_norm_fn


@explained({"eps": "epsilon"})
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) · weight over the last dimension."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


@explained({"x": "x0", "eps": "epsilon"}, of_torch=True)
def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """rms_norm of h = dropout(rowscale · layerscale · x0) + residual.

    Arguments:
        layerscale: (n), a factor of each column of x0.
        epsilon: eps. The others: as in flash_attn.ops.triton.layer_norm.layer_norm_fn.

    Returns: y, then h with prenorm and the mask of what is kept, all True without dropout.
    """
    if layerscale is not None:
        check_wide("x0", x0, range(1, 65), "(…, n)")
        check_floats("layerscale", layerscale, x0.shape[-1:], x0.device, "x0")
    results = rms_norm_fn(
        x0 if layerscale is None else x0 * layerscale,
        weight,
        bias,
        residual,
        eps=epsilon,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        return_dropout_mask=return_dropout_mask,
        out_dtype=x0.dtype,
    )
    if not return_dropout_mask:
        return results
    *others, mask, _ = results
    return *others, torch.ones_like(x0, dtype=torch.bool) if mask is None else mask


class RMSNorm(nn.Module):
    """rms_norm as a module. Arguments: hidden_size is n; eps; of the weight device and dtype."""

    @explained(of_torch=True)
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every factor becomes 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, n) → (…, n)."""
        return rms_norm_fn(x, self.weight, None, eps=self.eps)


class DropoutAddRMSNorm(nn.Module):
    """dropout_add_rms_norm as a module; dropout in training mode only.

    Arguments: hidden_size is n, p is dropout_p; the others as in dropout_add_rms_norm.
    """

    @explained(of_torch=True)
    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every factor becomes 1."""
        nn.init.ones_(self.weight)

    @explained({"dropout_p": "p", "epsilon": "eps"})
    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """(…, n) → (…, n); with prenorm also the sum of x0 and residual."""
        return dropout_add_rms_norm(
            x0,
            residual,
            self.weight,
            None,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )
