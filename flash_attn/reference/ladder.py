r"""From softmax to FlashAttention-2, one idea a function. One head: q (n, d), k and v (m, d).

Each rung computes the same numbers as the one before and reads memory less often.

    naive_softmax        exp(x) / Σ exp(x)                            overflows
    safe_softmax         the maximum first                            3 passes over x
    online_softmax       maximum and sum together                     2 passes
    standard_attention   softmax(Q Kᵀ) V, the matrix in memory        O(n m) memory
    one_pass_attention   online softmax and the product with V        1 pass, O(n d) memory
    flash_attention_1    the same on tiles, K and V outside           O is rescaled in memory
    flash_attention_2    the same on tiles, Q outside                 O stays in registers
    split_kv             the keys cut into pieces, side by side       one reduction of (o, l, m)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.reference.arguments import (
    check_blocks,
    check_head,
    check_rows,
    check_splits,
    checked,
)


@checked(check_rows)
def naive_softmax(x: Tensor) -> Tensor:
    """softmax(x)ᵢ = exp(xᵢ) / Σⱼ exp(xⱼ), as it is defined.

    In fp32 exp overflows above 88.7, in fp16 above 11.1: then inf / inf = NaN, although every
    softmax(x)ᵢ is in [0, 1].
    """
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


@checked(check_rows)
def safe_softmax(x: Tensor) -> Tensor:
    """Softmax that cannot overflow. x: (…, n).

    For any m,

        exp(xᵢ) / Σⱼ exp(xⱼ) = exp(xᵢ - m) / Σⱼ exp(xⱼ - m)

    and with m = max x every exponent is at most 0 and the sum at least 1. Three passes over x: one
    for m, one for the sum, one for the results.
    """
    m = x.amax(-1, keepdim=True)  # pass 1
    l = torch.exp(x - m).sum(-1, keepdim=True)  # pass 2
    return torch.exp(x - m) / l  # pass 3


@checked(check_rows)
def online_softmax(x: Tensor) -> Tensor:
    """Maximum and sum in one pass (Milakov and Gimelshein 2018). x: (…, n).

    Let mᵢ and lᵢ be the maximum and the sum of the first i elements, lᵢ = Σ_{j≤i} exp(xⱼ - mᵢ).
    When xᵢ comes, the maximum may grow, and each term of the old sum shrinks by the same factor
    exp(mᵢ₋₁ - mᵢ):

        mᵢ = max(mᵢ₋₁, xᵢ)
        lᵢ = lᵢ₋₁ exp(mᵢ₋₁ - mᵢ) + exp(xᵢ - mᵢ)

    from m₀ = -∞, l₀ = 0. The second pass writes exp(xᵢ - mₙ) / lₙ.
    """
    m = torch.full_like(x[..., 0], -torch.inf)
    l = torch.zeros_like(m)
    for x_i in x.unbind(-1):  # pass 1
        m_new = torch.maximum(m, x_i)
        l = l * torch.exp(m - m_new) + torch.exp(x_i - m_new)
        m = m_new
    return torch.exp(x - m[..., None]) / l[..., None]  # pass 2


@checked(check_head)
def standard_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Callable = safe_softmax) -> Tensor:
    """O = softmax(Q Kᵀ / √d) V, step by step: the n × m matrices S and P go through memory."""
    S = q @ k.mT / q.size(-1) ** 0.5
    P = softmax(S)
    return P @ v


@checked(check_head)
def one_pass_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in one pass over the keys, without the matrix.

    The second pass of online softmax exists to write P, but attention only wants o = Σⱼ pⱼ vⱼ.
    Carry that sum too, relative to the maximum so far: õᵢ = Σ_{j≤i} exp(sⱼ - mᵢ) vⱼ obeys the
    recurrence of lᵢ with vᵢ in it,

        õᵢ = õᵢ₋₁ exp(mᵢ₋₁ - mᵢ) + exp(sᵢ - mᵢ) vᵢ

    and o = õₘ / lₘ. The state of a query is (õ, l, m): d + 2 numbers, however many keys there are.
    """
    scale = q.size(-1) ** -0.5
    m = torch.full_like(q[:, 0], -torch.inf)
    l = torch.zeros_like(m)
    o = torch.zeros(q.size(0), v.size(-1), dtype=q.dtype, device=q.device)
    for k_j, v_j in zip(k, v, strict=True):
        s = q @ k_j * scale
        m_new = torch.maximum(m, s)
        shrink, p = torch.exp(m - m_new), torch.exp(s - m_new)
        l = l * shrink + p
        o = o * shrink[:, None] + p[:, None] * v_j
        m = m_new
    return o / l[:, None]


@checked(check_head, check_blocks)
def flash_attention_1(
    q: Tensor, k: Tensor, v: Tensor, block_q: int = 64, block_k: int = 64
) -> Tensor:
    """FlashAttention's loops (Dao et al. 2022, algorithm 1): K and V outside, Q inside.

    One key at a time becomes a block of keys: the maximum and the sums of a tile S = Qᵢ Kⱼᵀ are
    those of its rows. A tile lives in fast memory (SRAM) only. K and V are read once; Q, O, l and m
    are read and written once for each block of keys. O in memory is normalised after each block: it
    is multiplied by the old sum, rescaled, and divided by the new one,

        O ← (l e^(m - m_new) O + e^(m̃ - m_new) P̃ V) / l_new
    """
    scale = q.size(-1) ** -0.5
    O = torch.zeros(q.size(0), v.size(-1), dtype=q.dtype, device=q.device)
    m = torch.full_like(q[:, :1], -torch.inf)
    l = torch.zeros_like(m)
    for j in range(0, k.size(0), block_k):
        K, V = k[j : j + block_k], v[j : j + block_k]
        for i in range(0, q.size(0), block_q):
            rows = slice(i, i + block_q)
            S = q[rows] @ K.mT * scale
            m_tile = S.amax(-1, keepdim=True)
            P = torch.exp(S - m_tile)
            l_tile = P.sum(-1, keepdim=True)

            m_new = torch.maximum(m[rows], m_tile)
            old, new = torch.exp(m[rows] - m_new), torch.exp(m_tile - m_new)
            l_new = l[rows] * old + l_tile * new
            O[rows] = (l[rows] * old * O[rows] + new * (P @ V)) / l_new
            m[rows], l[rows] = m_new, l_new
    return O


@checked(check_head, check_blocks)
def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, block_q: int = 64, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's loops (Dao 2023, algorithm 1): Q outside, K and V inside.

    Blocks of queries are independent of each other, so each one has its processor, and its state
    (Õ, l, m) never leaves the registers. Õ stays unnormalised until the end: no division in the
    loop. Of l and m only

        LSE = m + log l = log Σⱼ exp(sⱼ)

    is kept: with it the backward recomputes any tile of P as exp(S - LSE), with no maximum and no
    sum. Returns O and the LSE.
    """
    scale = q.size(-1) ** -0.5
    O = torch.empty(q.size(0), v.size(-1), dtype=q.dtype, device=q.device)
    LSE = torch.empty_like(q[:, 0])
    for i in range(0, q.size(0), block_q):  # in parallel
        rows = slice(i, i + block_q)
        Q = q[rows] * scale
        o = torch.zeros_like(O[rows])
        m = torch.full_like(Q[:, :1], -torch.inf)
        l = torch.zeros_like(m)
        for j in range(0, k.size(0), block_k):
            S = Q @ k[j : j + block_k].mT
            m_new = torch.maximum(m, S.amax(-1, keepdim=True))
            P = torch.exp(S - m_new)
            shrink = torch.exp(m - m_new)
            l = l * shrink + P.sum(-1, keepdim=True)
            o = o * shrink + P @ v[j : j + block_k]
            m = m_new
        O[rows] = o / l
        LSE[rows] = (m + torch.log(l)).squeeze(-1)
    return O, LSE


class Partial(NamedTuple):
    """Attention of all queries to some of the keys, unnormalised."""

    o: Tensor  # (n, d_v): Σⱼ exp(sⱼ - m) vⱼ
    l: Tensor  # (n, 1):   Σⱼ exp(sⱼ - m)
    m: Tensor  # (n, 1):   maxⱼ sⱼ


@checked()
def combine(a: Partial, b: Partial) -> Partial:
    """Attention to the keys of a and b together: both rescaled to the common maximum, then added.

    Associative and commutative, with (0, 0, -∞) for no keys at all: any order of any pieces gives
    the result. The loop of flash_attention_2 is this operation applied from left to right.
    """
    m = torch.maximum(a.m, b.m)
    # Two pieces without keys: -∞ - -∞ would be NaN.
    base = m.masked_fill(m == -torch.inf, 0.0)
    shrink_a, shrink_b = torch.exp(a.m - base), torch.exp(b.m - base)
    return Partial(a.o * shrink_a + b.o * shrink_b, a.l * shrink_a + b.l * shrink_b, m)


@checked(check_head, check_splits)
def split_kv(q: Tensor, k: Tensor, v: Tensor, num_splits: int = 4) -> tuple[Tensor, Tensor]:
    """Split-KV (Flash-Decoding): the keys in num_splits pieces. Returns O and the LSE.

    A decoding step has one query and a long cache: there are no blocks of queries to share out, so
    the keys are shared out. Each piece gives its (o, l, m) in parallel; `combine` reduces them in
    any order.
    """
    scale = q.size(-1) ** -0.5
    whole = Partial(
        torch.zeros(q.size(0), v.size(-1), dtype=q.dtype, device=q.device),
        torch.zeros_like(q[:, :1]),
        torch.full_like(q[:, :1], -torch.inf),
    )
    pieces = zip(k.tensor_split(num_splits), v.tensor_split(num_splits), strict=True)
    for K, V in pieces:  # in parallel
        if K.size(0) == 0:
            continue
        S = q @ K.mT * scale
        m = S.amax(-1, keepdim=True)
        P = torch.exp(S - m)
        whole = combine(whole, Partial(P @ V, P.sum(-1, keepdim=True), m))
    return whole.o / whole.l, (whole.m + torch.log(whole.l)).squeeze(-1)
