"""Rotary position embedding (Su et al. 2021, RoFormer) in PyTorch: differentiable, on any device.

A pair of dimensions (x₁, x₂) at position t turns by the angle t·θ, so that the product of a query
and a key depends on the distance of their positions only:

    x₁' = x₁ cos(tθ) - x₂ sin(tθ)
    x₂' = x₁ sin(tθ) + x₂ cos(tθ)
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flash_attn._errors import explain, explained, flag, shown
from flash_attn._functions import applied


def _rows(table: Tensor, x: Tensor, seqlen_offsets, cu_seqlens) -> Tensor:
    """A table's rows at the positions of x's tokens: (…, seqlen, 1, rotary_dim / 2)."""
    last = table.size(0) - 1
    if cu_seqlens is not None:
        token = torch.arange(x.size(0), device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
        sequence = sequence.clamp(max=cu_seqlens.numel() - 2)
        offset = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        position = token - cu_seqlens[sequence] + offset
    elif isinstance(seqlen_offsets, Tensor):
        position = seqlen_offsets[:, None] + torch.arange(x.size(1), device=x.device)
    else:
        end = seqlen_offsets + x.size(1)
        if not 0 <= seqlen_offsets <= end <= last + 1:
            raise RuntimeError(
                f"flash_attn: cos: expected at least {end} rows (seqlen_offsets + seqlen),"
                f" got {last + 1}"
            )
        return table[seqlen_offsets:end, None]
    return table[position.clamp(0, last)][..., None, :]


def _check_rotated(x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets, cu_seqlens) -> None:
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims or not x.is_floating_point():
        shape = "(batch, seqlen, heads, d)" if dims == 4 else "(total, heads, d) with cu_seqlens"
        raise RuntimeError(
            f"flash_attn: x: expected a floating dtype and shape {shape}, got {shown(x)}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if not table.is_floating_point() or table.device != x.device:
            raise RuntimeError(
                f"flash_attn: {name}: expected a floating dtype on {x.device} as x has, got"
                f" {shown(table)} on {table.device}"
            )
    is_number = cu_seqlens is not None and not isinstance(seqlen_offsets, Tensor)
    if is_number and not 0 <= seqlen_offsets <= cos.size(0):
        raise RuntimeError(
            f"flash_attn: seqlen_offsets: expected 0 to {cos.size(0)} (the rows of cos), got"
            f" {seqlen_offsets}"
        )


def _rotated(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens):
    _check_rotated(x, cos, sin, seqlen_offsets, cu_seqlens)
    half = cos.size(-1)
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * half > x.size(-1):
        raise RuntimeError(
            "flash_attn: cos, sin: must have shape (rows, rotary_dim / 2) with rotary_dim at most"
            f" {x.size(-1)}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    # 16-bit inputs are turned in fp32 and rounded once.
    wide = torch.promote_types(x.dtype, torch.float32)
    cos = _rows(cos, x, seqlen_offsets, cu_seqlens).to(wide)
    sin = _rows(sin, x, seqlen_offsets, cu_seqlens).to(wide)
    turned, kept = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    pair = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), kept), -1)


class _Turn(NamedTuple):
    """One rotation: this part of dimension 2 (None: all of x) by this table."""

    part: int | slice | None
    cos: Tensor
    sin: Tensor


def _turn(x: Tensor, turns: tuple[_Turn, ...], options: tuple, backward: bool = False) -> Tensor:
    """x with these parts rotated in its memory, out of autograd's sight; back, in the backward."""
    for part, cos, sin in turns:
        view = x if part is None else x[:, :, part]
        view.copy_(_rotated(view, cos, -sin if backward else sin, *options))
    return x


class _InPlaceRotation(torch.autograd.Function):
    """Rotates x where autograd's own tracking of in-place writes refuses: leaves, and views that
    come from split, unbind or another Function. There x itself keeps the graph that it had, and the
    result is what carries the rotation's."""

    @staticmethod
    def forward(ctx, x, turns, options):
        ctx.turns, ctx.options = turns, options
        # A view that came from split raises at its next use once it has a new version, so for views
        # the version stays: autograd cannot tell that someone saved the old values.
        _turn(x.data if x._is_view() else x.detach(), turns, options)
        if not (x.is_leaf or x._is_view()):
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return _turn(gradient.clone(), ctx.turns, ctx.options, backward=True), None, None


def _in_place(x: Tensor, turns: tuple[_Turn, ...], *options: object) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _InPlaceRotation.apply(x, turns, options)
    _turn(x, turns, options)
    return x


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim dimensions of x by the positions of its tokens.

    Arguments:
        x: (batch, seqlen, heads, d), or (total, heads, d) with cu_seqlens. Any float dtype.
        cos, sin: (rows, rotary_dim / 2), row t for position t; rotary_dim at most d.
        interleaved: pairs are dimensions 0 and 1, 2 and 3, … (GPT-J); else i and i + rotary_dim / 2
            (GPT-NeoX).
        inplace: write into x's memory. Use what is returned: it carries the gradient, while an x
            that is a leaf or a view keeps the graph that it had.
        seqlen_offsets: position of the first token: int, or int32 (batch). Positions that come from
            a tensor are clamped to the table.
        cu_seqlens: int32 (batch + 1).
        max_seqlen: not needed; part of upstream's signature.

    Returns: x's shape and dtype.
    """
    try:
        options = interleaved, seqlen_offsets, cu_seqlens
        if inplace:
            return _in_place(x, (_Turn(None, cos, sin),), *options)
        return _rotated(x, cos, sin, *options)
    except Exception as error:
        explain(error, apply_rotary_emb, locals(), of_torch=True)
        raise


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k inside qkv, in place.

    Arguments:
        qkv: (batch, seqlen, 3, heads, d), or (batch, seqlen, num_heads_q + 2 * heads_kv, d).
        cos, sin: as in apply_rotary_emb; cos_k, sin_k: for k, where it has tables of its own
            (XPos).
        num_heads_q: heads of q; needed for the second shape.

    Returns: qkv; see apply_rotary_emb's inplace.
    """
    try:
        if qkv.dim() == 5 and qkv.size(2) == 3:
            q, k = 0, 1
        elif qkv.dim() != 4:
            raise RuntimeError(
                "flash_attn: qkv: expected shape (batch, seqlen, 3, heads, d) or (batch, seqlen,"
                f" num_heads_q + 2 * heads_kv, d), got {tuple(qkv.shape)}"
            )
        elif (
            num_heads_q is None
            or not 0 < num_heads_q < qkv.size(2)
            or ((qkv.size(2) - num_heads_q) % 2)
        ):
            raise RuntimeError(
                "flash_attn: num_heads_q: expected the heads of q for a 4-dimensional qkv of"
                f" {qkv.size(2)} heads, got {num_heads_q}"
            )
        else:
            heads_kv = (qkv.size(2) - num_heads_q) // 2
            q, k = slice(num_heads_q), slice(num_heads_q, num_heads_q + heads_kv)
        cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
        turns = _Turn(q, cos, sin), _Turn(k, cos_k, sin_k)
        return _in_place(qkv, turns, interleaved, seqlen_offsets, None)
    except Exception as error:
        tables = {"cos": "cos, cos_k", "sin": "sin, sin_k", "cos, sin": "cos, sin, cos_k, sin_k"}
        names = {"x": "qkv"} | tables
        explain(error, apply_rotary_emb_qkv_, locals(), names, of_torch=True)
        raise


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates k inside kv (batch, seqlen, 2, heads_kv, d), in place. Returns kv; see
    apply_rotary_emb's inplace."""
    try:
        return _in_place(kv, (_Turn(0, cos, sin),), interleaved, seqlen_offsets, None)
    except Exception as error:
        explain(error, apply_rotary_emb_kv_, locals(), {"x": "kv"}, of_torch=True)
        raise


ApplyRotaryEmb = applied("ApplyRotaryEmb", apply_rotary_emb)
ApplyRotaryEmbQKV_ = applied("ApplyRotaryEmbQKV_", apply_rotary_emb_qkv_)
ApplyRotaryEmbKV_ = applied("ApplyRotaryEmbKV_", apply_rotary_emb_kv_)


class RotaryEmbedding(nn.Module):
    """Keeps cos and sin tables and rotates with them. θᵢ = base^(-2i / dim).

    Arguments:
        dim: rotary_dim, even.
        base: see above.
        interleaved: as in apply_rotary_emb.
        scale_base: not None: XPos (Sun et al. 2022): q's tables grow and k's shrink with the
            position by ((2i + 0.4 dim) / (1.4 dim))^((t - seqlen / 2) / scale_base); 512 is usual.
        device: of the buffers.
    """

    @explained(of_torch=True)
    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise RuntimeError(f"flash_attn: dim: expected an even number, got {shown(dim)}")
        self.dim = dim
        self.base = float(base)
        self.interleaved = flag("interleaved", interleaved)
        self.scale_base = None if scale_base is None else float(scale_base)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = None
        self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device=None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-even / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device=None, dtype=None) -> None:
        """Makes tables of seqlen rows on that device and of that dtype, unless they are there."""
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == device
            and cached.dtype == dtype
            and not (self.training and cached.is_inference())
        ):
            return
        # Angles in fp32 whatever the model's dtype: a large position times a frequency has no
        # digits to spare. A model cast to 16 bits has cast inv_freq as well, so that is computed
        # anew.
        is_fp32 = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(device) if is_fp32 else self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        cos, sin = torch.outer(position, inv_freq).cos(), torch.outer(position, inv_freq).sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            self._seq_len_cached = seqlen
            return
        power = (position - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
        self._seq_len_cached = seqlen

    @explained({"x": "qkv", "cos": "max_seqlen", "cos, cos_k": "max_seqlen"}, of_torch=True)
    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place: qkv as in apply_rotary_emb_qkv_, or q (as qkv) and kv.

        Arguments:
            seqlen_offset: position of the first token: int, or int32 (batch), which needs
                max_seqlen.
            max_seqlen: rows that the tables must have.
        """
        if max_seqlen is None and isinstance(seqlen_offset, Tensor):
            raise RuntimeError(
                "flash_attn: max_seqlen: expected an int with a tensor seqlen_offset, got None"
            )
        if kv is not None and kv.device != qkv.device:
            raise RuntimeError(
                f"flash_attn: kv: expected device {qkv.device} as qkv has, got {kv.device}"
            )
        rows = qkv.size(1) + seqlen_offset if max_seqlen is None else max_seqlen
        self._update_cos_sin_cache(rows, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        cos_k = cos if self.scale is None else self._cos_k_cached
        sin_k = sin if self.scale is None else self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
