"""The rotation under upstream's name and without a gradient: see flash_attn.layers.rotary."""

import torch
from torch import Tensor

from flash_attn._errors import explained
from flash_attn.layers.rotary import apply_rotary_emb


@explained(of_torch=True)
@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """apply_rotary_emb with the arguments in another order, and no gradient.

    conjugate: turn the other way, which undoes the rotation and is its backward.
    """
    sin = -sin if conjugate else sin
    return apply_rotary_emb(
        x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )
