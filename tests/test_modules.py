"""MHA and the attention modules against torch's, and generation against the whole sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashSelfAttention,
    ParallelMHA,
    SelfAttention,
    get_alibi_slopes,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLASH = [False, True]


def attend(q, k, v, mask=None, scale: float | None = None) -> torch.Tensor:
    """torch's attention of (batch, seqlen, heads, d); mask broadcasts over (b, h, i, j)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flash", FLASH)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_against_torch(checkpointing: bool, heads_kv: int, flash: bool, device: str) -> None:
    """Causal self-attention with rotation: output and every parameter's gradient."""
    options = dict(causal=True, rotary_emb_dim=8, use_flash_attn=flash, softmax_scale=0.4)
    layer = MHA(32, 4, heads_kv, checkpointing=checkpointing, device=device, **options)
    x = torch.randn(2, 9, 32, device=device, requires_grad=True)
    out = layer(x)

    q, k, v = (x @ layer.Wqkv.weight.T + layer.Wqkv.bias).split(
        [32, 8 * heads_kv, 8 * heads_kv], -1
    )
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in (q, k, v))
    angles = torch.arange(9, device=device)[:, None] * layer.rotary_emb.inv_freq
    q, k = (apply_rotary_emb(part, angles.cos(), angles.sin()) for part in (q, k))
    seen = torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    expected = layer.out_proj(attend(q, k, v, seen, 0.4).flatten(-2))
    torch.testing.assert_close(out, expected)
    inputs = [x, *layer.parameters()]
    weight = torch.randn_like(out)
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, e in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_against_multihead_attention() -> None:
    """The parameters' layout is that of nn.MultiheadAttention, too."""
    layer, torchs = MHA(32, 4), torch.nn.MultiheadAttention(32, 4, batch_first=True)
    layer.Wqkv.load_state_dict({"weight": torchs.in_proj_weight, "bias": torchs.in_proj_bias})
    layer.out_proj.load_state_dict(torchs.out_proj.state_dict())
    x = torch.randn(2, 7, 32)
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    expected, _ = torchs(x, x, x, key_padding_mask=~keep)
    torch.testing.assert_close(layer(x, key_padding_mask=keep), expected)


def test_cross_attention() -> None:
    layer = MHA(32, 4, 2, cross_attn=True, use_flash_attn=True, return_residual=True)
    x, memory = torch.randn(2, 6, 32), torch.randn(2, 11, 32)
    k, v = layer.Wkv(memory).unflatten(-1, (2, 2, 8)).unbind(2)
    expected = layer.out_proj(attend(layer.Wq(x).unflatten(-1, (4, 8)), k, v).flatten(-2))
    out, residual = layer(x, memory)
    torch.testing.assert_close(out, expected)
    assert residual is x
    torch.testing.assert_close(layer(x, memory, mixer_subset=slice(2))[0], expected[:, :2])


@pytest.mark.parametrize("causal", [False, True])
def test_padding_mask_aligns_to_the_true_length(causal: bool) -> None:
    q, kv = torch.randn(2, 3, 4, 8), torch.randn(2, 7, 2, 2, 8)
    lengths = [7, 5]
    keep = torch.arange(7) < torch.tensor(lengths)[:, None]
    out = CrossAttention(causal)(q, kv, key_padding_mask=keep)
    for b, n in enumerate(lengths):
        seen = torch.ones(3, n, dtype=torch.bool)
        seen = seen.tril(n - 3) if causal else seen
        expected = attend(q[b : b + 1], *kv[b : b + 1, :n].unbind(2), seen)
        torch.testing.assert_close(out[b : b + 1], expected)


def test_self_attention_with_padding() -> None:
    qkv = torch.randn(2, 6, 3, 2, 8)
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    seen = keep[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    out = SelfAttention(softmax_scale=0.2)(qkv, causal=True, key_padding_mask=keep)
    torch.testing.assert_close(out, attend(*qkv.unbind(2), seen, 0.2))


def test_packed_sequences() -> None:
    layer = MHA(32, 4, causal=True, use_flash_attn=True, use_alibi=True, window_size=(3, 0))
    x = torch.randn(12, 32)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    expected = torch.cat([layer(part[None])[0] for part in x.split([5, 7])])
    torch.testing.assert_close(layer(x, cu_seqlens=cu, max_seqlen=7), expected)
    layer.inner_attn.alibi_slopes = None
    assert not torch.allclose(layer(x, cu_seqlens=cu, max_seqlen=7), expected)


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_convolution_is_causal(heads_kv: int) -> None:
    layer = MHA(32, 4, heads_kv, dwconv=True, causal=True)
    x = torch.randn(1, 8, 32)
    changed = x.clone()
    changed[:, 5] += 1
    before, after = layer(x), layer(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flash", FLASH)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("form", ["plain", "rotary", "xpos", "alibi and window", "lengths"])
def test_generation(form: str, heads_kv: int, flash: bool, device: str) -> None:
    """A prompt and single tokens through the cache give what the whole sequence gives."""
    options = {
        "plain": {},
        "rotary": dict(rotary_emb_dim=8, rotary_emb_interleaved=True),
        "xpos": dict(rotary_emb_dim=8, rotary_emb_scale_base=512),
        "alibi and window": dict(use_alibi=True, window_size=(3, 0)),
        "lengths": dict(rotary_emb_dim=8),
    }[form]
    if not flash and form in ("alibi and window", "lengths"):
        pytest.skip("needs use_flash_attn")
    layer = MHA(
        32, 4, heads_kv, causal=True, layer_idx=3, use_flash_attn=flash, device=device, **options
    )
    x = torch.randn(2, 10, 32, device=device)
    lengths = None
    if form == "lengths":
        lengths = torch.zeros(2, dtype=torch.int32, device=device)
    cache = SimpleNamespace(
        key_value_memory_dict={},
        max_batch_size=2,
        max_seqlen=10,
        batch_size_offset=0,
        seqlen_offset=0,
        lengths_per_sample=lengths,
    )
    with torch.no_grad():
        # XPos' tables depend on how long they are.
        if form == "xpos":
            layer.rotary_emb._update_cos_sin_cache(10, device=x.device, dtype=x.dtype)
        expected = layer(x)
        out = [layer(x[:, :6], inference_params=cache)]
        for token in range(6, 10):
            cache.seqlen_offset = token
            if lengths is not None:
                lengths.fill_(token)
            out.append(layer(x[:, token : token + 1], inference_params=cache))
    torch.testing.assert_close(torch.cat(out, 1), expected)
    shape = cache.key_value_memory_dict[3].shape
    assert shape == layer.allocate_inference_cache(2, 10).shape == (2, 10, 2, heads_kv, 8)


def test_dropout_in_training_only() -> None:
    for flash in FLASH:
        layer = MHA(32, 4, dropout=0.5, use_flash_attn=flash)
        x = torch.randn(1, 6, 32)
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert torch.equal(layer(x), layer(x))


BAD = {
    "num_heads_kv: expected a divisor of 4, got 3": lambda: MHA(32, 4, 3),
    "embed_dim: expected a multiple of 4, got 30": lambda: MHA(30, 4),
    "use_alibi: expected use_flash_attn": lambda: MHA(32, 4, use_alibi=True),
    "window_size: expected use_flash_attn": lambda: MHA(32, 4, window_size=(1, 1)),
    "rotary_emb_dim: expected 0 with cross": lambda: MHA(32, 4, cross_attn=True, rotary_emb_dim=8),
    "x_kv, mixer_subset: expected None": lambda: MHA(32, 4)(torch.zeros(1, 2, 32), mixer_subset=0),
    "key_padding_mask: expected None": lambda: MHA(32, 4, use_flash_attn=True)(
        torch.zeros(1, 2, 32), key_padding_mask=torch.ones(1, 2).bool()
    ),
    "cu_seqlens: expected use_flash_attn": lambda: MHA(32, 4)(
        torch.zeros(2, 32), cu_seqlens=torch.tensor([0, 2]), max_seqlen=2
    ),
    "layer_idx: expected an int": lambda: MHA(32, 4)(
        torch.zeros(1, 2, 32), inference_params=SimpleNamespace()
    ),
    "inference_params: expected a cache of 2 rows of 3 tokens": lambda: MHA(32, 4, layer_idx=0)(
        torch.zeros(2, 3, 32),
        inference_params=SimpleNamespace(
            key_value_memory_dict={},
            max_batch_size=2,
            max_seqlen=2,
            batch_size_offset=0,
            seqlen_offset=0,
            lengths_per_sample=None,
        ),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_refusals(message: str) -> None:
    with pytest.raises(RuntimeError, match=f"flash_attn: {message}"):
        BAD[message]()


def test_parallel_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="flash_attn: ParallelMHA: .* expected MHA"):
        ParallelMHA(32, 4, None)


def test_alibi_slopes() -> None:
    assert get_alibi_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert get_alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert FlashSelfAttention(alibi_slopes=torch.ones(2)).state_dict() == {}


def test_a_refused_call_leaves_the_tables() -> None:
    """Tables that could not be made do not count as made."""
    rotary, qkv = RotaryEmbedding(8), torch.randn(2, 9, 3, 4, 8)
    expected = RotaryEmbedding(8)(qkv.clone())
    rotary(qkv[:, :4].clone())
    with pytest.raises(TypeError, match="flash_attn: max_seqlen: expected int"):
        rotary(qkv.clone(), max_seqlen=2**63)
    assert torch.equal(rotary(qkv), expected)
