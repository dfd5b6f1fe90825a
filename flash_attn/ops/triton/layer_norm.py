"""Layer and RMS norm with what stands before them in a block, under upstream's names.

torch's functions, on any device; sums and norms in fp32 (fp64 for fp64 inputs), rounded once.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from flash_attn._errors import check_floats, check_wide, explained, shown


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """x after dropout, and the mask of what is kept."""
    if p == 0.0:
        return x, None
    keep = torch.rand_like(x, dtype=torch.float32) >= p
    return (x * keep) / (1.0 - p), keep


def _check(x: Tensor, of_columns: dict, like_x: dict, rowscale: Tensor | None) -> None:
    """That the tensors beside x fit it: those that are (n), those that are (…, n), and rowscale."""
    check_wide("x", x, range(1, 65), "(…, n)")
    for tensors, shape in ((of_columns, x.shape[-1:]), (like_x, x.shape)):
        for name, tensor in tensors.items():
            if tensor is not None:
                check_floats(name, tensor, shape, x.device)
    if rowscale is not None:
        check_floats("rowscale", rowscale, x.shape[:-1], x.device)


@explained(of_torch=True)
def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """h = dropout(rowscale · x) + dropout(x1) + residual,   y = norm(h) · weight + bias

    Arguments:
        x, x1, residual: (…, n). x1 goes without rowscale.
        weight, bias: (n); weight1, bias1: of a second output y1 of the same h.
        dropout_p: probability in [0, 1) that an element of x (of x1) is dropped.
        eps: added to the variance, or to the mean square.
        rowscale: (…), a factor of each row of x.
        prenorm: also return h, in residual's dtype (x's, if there is none).
        residual_in_fp32: without a residual, return h in fp32.
        zero_centered_weight: the factors are 1 + weight and 1 + weight1.
        is_rms_norm: divide by the root mean square, without subtracting the mean.
        return_dropout_mask: also return the bool masks of x and x1, True: kept; None without one.
        out_dtype: of y and y1. Default: x's.
        out, residual_out: tensors to write y and h into.

    Returns: y, then y1 with weight1, h with prenorm, and the two masks: a tuple if more than y.
    """
    if x1 is not None and rowscale is not None:
        raise RuntimeError("flash_attn: rowscale: expected None with x1, got both")
    of_columns = {"weight": weight, "bias": bias, "weight1": weight1, "bias1": bias1}
    like_x = {"x1": x1, "residual": residual, "out": out, "residual_out": residual_out}
    _check(x, of_columns, like_x, rowscale)
    if not 0.0 <= dropout_p < 1.0:
        raise RuntimeError(
            f"flash_attn: dropout_p: expected a probability in [0, 1), got {shown(dropout_p)}"
        )
    if not eps >= 0.0:
        raise RuntimeError(f"flash_attn: eps: expected at least 0, got {shown(eps)}")
    wide = torch.promote_types(x.dtype, torch.float32)
    hidden = x.to(wide)
    if rowscale is not None:
        hidden = hidden * rowscale[..., None]
    hidden, mask = _dropped(hidden, dropout_p)
    mask1 = None
    if x1 is not None:
        dropped, mask1 = _dropped(x1.to(wide), dropout_p)
        hidden = hidden + dropped
    residual_dtype = torch.float32 if residual_in_fp32 else x.dtype
    if residual is not None:
        hidden, residual_dtype = hidden + residual, residual.dtype

    def normed(weight: Tensor, bias: Tensor | None) -> Tensor:
        factor = weight.to(wide) + 1.0 if zero_centered_weight else weight.to(wide)
        summand = None if bias is None else bias.to(wide)
        if not is_rms_norm:
            y = layer_norm(hidden, weight.shape, factor, summand, eps)
        else:
            y = rms_norm(hidden, weight.shape, factor, eps)
            y = y if summand is None else y + summand
        return y.to(dtype=x.dtype if out_dtype is None else out_dtype)

    y = normed(weight, bias)
    results = [y if out is None else out.copy_(y)]
    if weight1 is not None:
        results.append(normed(weight1, bias1))
    if prenorm:
        hidden = hidden.to(residual_dtype)
        results.append(hidden if residual_out is None else residual_out.copy_(hidden))
    if return_dropout_mask:
        results += [mask, mask1]
    return tuple(results) if len(results) > 1 else results[0]


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """layer_norm_fn with is_rms_norm. Arguments: as there."""
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
        out_dtype,
        out,
        residual_out,
    )


class RMSNorm(nn.Module):
    """rms_norm_fn as a module; dropout in training mode only.

    Arguments: hidden_size is n; the others as in layer_norm_fn, of the weight also device and
    dtype.
    """

    @explained(of_torch=True)
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every factor becomes 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """(…, n) → (…, n); with prenorm also the sum of x and residual."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )
