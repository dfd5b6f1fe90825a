"""FlexAttention, compiled for one call: a mask and a score term as functions of positions."""

from collections.abc import Callable

import torch

Term = Callable[..., torch.Tensor]

# Tiles for head dims above 256, where torch 2.11's own ones of the forward take 256 KiB of shared
# memory: a block has 227. "wide" takes 192 KiB and in the backward 128, "narrow" 128 and, with
# torch's tiles of the backward, 64. Compiled for Hopper, the backward of the first keeps 864 bytes
# of a thread in memory, that of the second 176.
TILES = {
    "wide": {"fwd_num_stages": 2, "fwd_num_warps": 8, "bwd_num_stages": 1, "bwd_num_warps": 8}
    | {f"bwd_BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")},
    "narrow": {"fwd_BLOCK_N": 64, "fwd_num_stages": 1, "fwd_num_warps": 8},
}
# Pairs of queries and keys, over heads whose masks differ, up to which a mask is made as it stands:
# that stores all of them, and compiling it takes longer than the race of a case.
EAGER_PAIRS = 1 << 29


def block_mask(sees: Term, heads: int | None, seqlen: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    pairs = (heads or 1) * seqlen**2
    make = create_block_mask if pairs <= EAGER_PAIRS else torch.compile(create_block_mask)
    return make(sees, None, heads, seqlen, seqlen, device=device)


def attention(
    seqlen: int,
    head_dim: int,
    device: torch.device,
    sees: Term | None = None,
    score: Term | None = None,
    heads: int | None = None,
    tiles: str = "wide",
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """As a function of q, k, v, (batch, seqlen, heads, head_dim). head_dim: the wider one of the
    keys and the values. heads: how many masks there are; None: all heads have the same. tiles: of
    TILES, where that is above 256."""
    from torch import _dynamo
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    config.donated_buffer = False  # else a backward cannot run twice on one graph
    _dynamo.reset()  # else the ninth shape of a process would not be compiled
    mask = None if sees is None else block_mask(sees, heads, seqlen, device)
    compiled = torch.compile(flex_attention, dynamic=False)
    options = TILES[tiles] if head_dim > 256 else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=score,
            block_mask=mask,
            enable_gqa=q.size(2) != k.size(2),
            kernel_options=options,
        ).transpose(1, 2)

    return attend
