"""The attention layer as a torch.nn module, under upstream's name."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn._errors import expect, explain, explained, flag, shown
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "ParallelMHA",
    "SelfAttention",
    "get_alibi_slopes",
]


def _update_kv_cache(kv: Tensor, inference_params, layer_idx: int) -> Tensor:
    """Writes kv (batch, seqlen, 2, heads_kv, d) behind the tokens that the layer's cache holds.

    Returns the cache's rows of this batch up to the new end. The first call makes the cache.
    """
    caches = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        caches[layer_idx] = kv.new_empty(
            inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:]
        )
    first, start = inference_params.batch_size_offset, inference_params.seqlen_offset
    rows = caches[layer_idx][first : first + kv.size(0), : start + kv.size(1)]
    if rows.shape[:2] != (kv.size(0), start + kv.size(1)):
        raise RuntimeError(
            f"flash_attn: inference_params: expected a cache of {first + kv.size(0)} rows of"
            f" {start + kv.size(1)} tokens, got {tuple(caches[layer_idx].shape[:2])}"
        )
    rows[:, start:] = kv
    return rows


_OF_ROTARY = {
    "dim": "rotary_emb_dim",
    "base": "rotary_emb_base",
    "scale_base": "rotary_emb_scale_base",
    "interleaved": "rotary_emb_interleaved",
    "nheads": "num_heads",
}


class MHA(nn.Module):
    """The attention layer with its projections, for training and generation.

    Parameters and their names are upstream's: Wqkv (Wq and Wkv with cross_attn), out_proj.

    Arguments:
        embed_dim: width of x; head dim is embed_dim / num_heads.
        num_heads, num_heads_kv: of q, and of k and v (default: num_heads).
        cross_attn: k and v come from x_kv.
        qkv_proj_bias, out_proj_bias: the projections have biases.
        dropout: of the attention weights, in training mode only.
        softmax_scale, causal, window_size: as in flash_attn_func.
        layer_idx: this layer's key among the caches of inference_params.
        dwconv: a causal depthwise convolution over 3 tokens after the projection.
        rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: of a
            RotaryEmbedding; 0: none.
        use_alibi: slopes from get_alibi_slopes.
        fused_bias_fc: not needed; part of upstream's signature.
        use_flash_attn: False takes padding as key_padding_mask, True as cu_seqlens.
        return_residual: forward returns (out, x).
        checkpointing: the backward computes the attention again.
        device, dtype: of the parameters.
    """

    @explained(_OF_ROTARY, of_torch=True)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = flag("return_residual", return_residual)
        self.checkpointing = flag("checkpointing", checkpointing)
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        expect(
            num_heads % self.num_heads_kv == 0,
            "num_heads_kv",
            f"a divisor of {num_heads}",
            self.num_heads_kv,
        )
        expect(embed_dim % num_heads == 0, "embed_dim", f"a multiple of {num_heads}", embed_dim)
        expect(use_flash_attn or not use_alibi, "use_alibi", "use_flash_attn with it", "none")
        expect(
            use_flash_attn or tuple(window_size) == (-1, -1),
            "window_size",
            "use_flash_attn with it",
            "none",
        )
        expect(
            rotary_emb_dim == 0 or not cross_attn,
            "rotary_emb_dim",
            "0 with cross_attn",
            rotary_emb_dim,
        )
        self.head_dim = embed_dim // num_heads
        self._is_packed = not cross_attn and self.num_heads_kv == num_heads
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        place = {"device": device, "dtype": dtype}
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                interleaved=rotary_emb_interleaved,
                scale_base=rotary_emb_scale_base,
                device=device,
            )
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **place)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **place)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **place)
        if dwconv and self._is_packed:
            self.dwconv_qkv = self._convolution(embed_dim + kv_dim)
        elif dwconv:
            self.dwconv_q = self._convolution(embed_dim)
            self.dwconv_kv = self._convolution(kv_dim)
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            masks = {"alibi_slopes": slopes, "window_size": window_size}
            inner, cross = (
                partial(FlashSelfAttention, **masks),
                partial(FlashCrossAttention, **masks),
            )
        else:
            inner, cross = SelfAttention, CrossAttention
        options = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        self.inner_attn = inner(**options)
        self.inner_cross_attn = cross(**options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **place)

    @staticmethod
    def _convolution(channels: int) -> nn.Conv1d:
        return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels)

    @explained(of_torch=True)
    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """An empty cache (batch_size, max_seqlen, 2, heads_kv, d) for key_value_memory_dict."""
        weight = self.out_proj.weight
        shape = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def _project(self, x: Tensor, x_kv: Tensor | None, mixer_subset) -> tuple[Tensor, ...]:
        """qkv (…, 3, heads, d); or q (…, heads_q, d) and kv (…, 2, heads_kv, d)."""
        if self._is_packed:
            qkv = self.Wqkv(x)
            if self.dwconv:
                qkv = _convolved(self.dwconv_qkv, qkv)
            return (qkv.unflatten(-1, (3, self.num_heads, self.head_dim)),)
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv = self.Wqkv(x)
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if self.dwconv:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        return q, kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    def _attend_to_cache(self, q: Tensor, kv: Tensor, inference_params) -> Tensor:
        """Appends kv to this layer's cache and attends to it, with the rotation of both."""
        expect(not self.dwconv, "inference_params", "None with dwconv", "a cache")
        expect(self.layer_idx is not None, "layer_idx", "an int with inference_params", "None")
        if not hasattr(inference_params, "key_value_memory_dict"):
            raise RuntimeError(
                "flash_attn: inference_params: expected an object with key_value_memory_dict, got"
                f" {shown(inference_params)}"
            )
        lengths, table = inference_params.lengths_per_sample, None
        start = inference_params.seqlen_offset if lengths is None else lengths[: q.size(0)]
        generates = inference_params.seqlen_offset > 0 and self.use_flash_attn
        rotary = self.rotary_emb if self.rotary_emb_dim > 0 else None
        if rotary is not None and generates and rotary.scale is None:
            rotary._update_cos_sin_cache(
                inference_params.max_seqlen, device=q.device, dtype=q.dtype
            )
            table = rotary._cos_cached, rotary._sin_cached
        elif rotary is not None:
            q, kv = rotary(q, kv, seqlen_offset=start, max_seqlen=inference_params.max_seqlen)
        if not generates:
            kv = _update_kv_cache(kv, inference_params, self.layer_idx)
            return self.inner_cross_attn(q, kv)
        cache = inference_params.key_value_memory_dict[self.layer_idx][: q.size(0)]
        attention = self.inner_cross_attn
        slopes = attention.alibi_slopes
        return flash_attn_with_kvcache(
            q,
            *cache.unbind(2),
            *kv.unbind(2),
            *(table or (None, None)),
            cache_seqlens=start,
            softmax_scale=attention.softmax_scale,
            causal=attention.causal,
            window_size=attention.window_size,
            rotary_interleaved=rotary is not None and rotary.interleaved,
            alibi_slopes=None if slopes is None else slopes.float(),
        )

    @explained({"qkv": "x", "q": "x", "kv": "x, x_kv"})
    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: object = None,
        inference_params: object = None,
        **options: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens → the same shape.

        Arguments:
            x_kv: (batch, seqlen_k, embed_dim), with cross_attn. Default: x.
            key_padding_mask: bool (batch, seqlen_k), True: a key; without use_flash_attn.
            cu_seqlens, max_seqlen: as in flash_attn_varlen_func, with use_flash_attn and without
                rotary_emb_dim and dwconv.
            mixer_subset: with cross_attn, an index of x's second dimension: only these query.
            inference_params: the caches: key_value_memory_dict by layer_idx, max_batch_size,
                max_seqlen, batch_size_offset, seqlen_offset (tokens in the caches) and
                lengths_per_sample (int32 (batch), or None). No gradient once seqlen_offset > 0.
            options: of the inner attention's forward.
        """
        if cu_seqlens is not None:
            plain = self.rotary_emb_dim == 0 and not self.dwconv
            expect(
                self.use_flash_attn and plain,
                "cu_seqlens",
                "use_flash_attn, and neither rotary_emb_dim nor dwconv, with it",
                "others",
            )
        expect(
            key_padding_mask is None or not self.use_flash_attn,
            "key_padding_mask",
            "None with use_flash_attn",
            "a mask",
        )
        expect(
            inference_params is None or (cu_seqlens is None and key_padding_mask is None),
            "inference_params",
            "neither cu_seqlens nor key_padding_mask with it",
            "one of them",
        )
        expect(
            self.cross_attn or (x_kv is None and mixer_subset is None),
            "x_kv, mixer_subset",
            "None without cross_attn",
            "one of them",
        )
        rank = 3 if cu_seqlens is None else 2
        for name, tokens in (("x", x), ("x_kv", x_kv)):
            if tokens is not None and (tokens.dim(), *tokens.shape[-1:]) != (rank, self.embed_dim):
                shape = f"({'batch, seqlen' if rank == 3 else 'total'}, {self.embed_dim})"
                raise RuntimeError(
                    f"flash_attn: {name}: expected shape {shape}, got {tuple(tokens.shape)}"
                )
        if self.use_flash_attn:
            options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **options}
        else:
            options = {"key_padding_mask": key_padding_mask, **options}
        try:
            parts = self._project(x, x_kv, mixer_subset)
        except Exception as error:
            explain(error, MHA.forward, locals(), of_torch=True)
            raise
        if inference_params is not None:
            q, kv = (parts[0][:, :, 0], parts[0][:, :, 1:]) if self._is_packed else parts
            out = self._attend_to_cache(q, kv, inference_params)
        else:
            if self.rotary_emb_dim > 0:
                turned = self.rotary_emb(*parts)
                parts = (turned,) if self._is_packed else turned
            attention = self.inner_attn if self._is_packed else self.inner_cross_attn
            if self.checkpointing:
                attention = partial(checkpoint, attention, use_reentrant=False)
            out = attention(*parts, **options)
        out = self.out_proj(out.flatten(-2))
        return (out, x) if self.return_residual else out


def _convolved(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """x (batch, seqlen, channels) convolved over its sequence, causally."""
    return convolution(x.mT)[..., :-2].mT


class ParallelMHA(nn.Module):
    """Upstream's tensor-parallel attention layer. Raises NotImplementedError."""

    def __init__(
        self, embed_dim: int, num_heads: int, process_group: object, *args: object, **kwargs: object
    ) -> None:
        raise NotImplementedError(
            "flash_attn: ParallelMHA: not part of this package, expected MHA, or flash_attn_func"
            " between parallel projections of your own"
        )
