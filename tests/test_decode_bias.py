"""Decode with an additive bias, a mask or a tree of new tokens, against float64: every dtype, every
form of cache, every way to broadcast."""

from __future__ import annotations

import pytest
import torch
from caches import CacheCase, each_cache
from cases import ATEN_CPU, ATEN_CUDA, DECODE_CUDA, DTYPES, Target, each_target, use
from test_cache_forms import FORMS, cache_cases, check

import flash_attn
from flash_attn import flash_attn_func, flash_attn_with_kvcache, flash_decode_func, masks

TARGETS = (ATEN_CPU, ATEN_CUDA, DECODE_CUDA)  # the forward kernels take neither
SHAPES = ["bhqk", "bhqk", "hqk", "bqk", "qk", "bk", "k", "bh", "q", ""]
BIASES = dict(
    bias=["bool", "fp32", "same", "same", "fp64"],
    bias_shape=SHAPES,
    heads=[(4, 2), (6, 1), (3, 3), (40, 2)],
)
TREES = dict(tree=["one", "each"], seqlen_q=[1, 2, 5, 19], new=[0, 5, 19], capacity=[70, 33, 300])


@each_cache(cache_cases(120, 31, **FORMS | BIASES))
def test_bias(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_cache(cache_cases(120, 32, **FORMS | TREES))
def test_tree(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


# Every class of head dims of both kernels, in several pieces and rounds of their rings.
CLASSES = [
    dict(d=d, dtype=dtype) for d in (64, 96, 128, 192, 256, 512) for dtype in ("bf16", "fp16")
]
CLASSES += [dict(d=d, dtype="fp32") for d in (64, 128, 256)]
CLASSES += [
    dict(d=d, dtype="bf16", cache=cache)
    for d in (64, 128, 192, 256, 512)
    for cache in ("fp8", "int8")
]


@each_cache(
    [
        CacheCase(batch=2, capacity=1100, lengths="tensor", **form | terms)
        for form in CLASSES
        for terms in (
            dict(bias="same", heads_q=8, num_splits=2),
            dict(bias="bool", bias_shape="bk", page_size=16, heads_q=8),
            dict(tree="each", seqlen_q=7, page_size=61),
        )
    ]
)
def test_classes(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


SHARED = dict(
    page_size=[16], shared=[True], leftpad=[False], new=[0, 2], rows=[False], lengths=["tensor"]
)


@each_cache(
    cache_cases(12, 33, **FORMS | BIASES | SHARED) + cache_cases(12, 34, **FORMS | TREES | SHARED)
)
def test_shared_prefix(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


def tensors(target: Target, seed: int, tokens: int = 4, capacity: int = 90):
    torch.manual_seed(seed)
    dtype = torch.float64 if target.backend == "aten" else torch.float16
    q = torch.randn(2, tokens, 4, 64).to(target.device, dtype)
    k, v = torch.randn(2, 2, capacity, 2, 64).to(target.device, dtype)
    return q, k, v, torch.tensor([capacity, 37], dtype=torch.int32, device=target.device)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-12 if actual.dtype == torch.float64 else 2.0**-9
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each_target(*TARGETS)
def test_a_chain_is_causal(target: Target, seed: int) -> None:
    q, k, v, lengths = tensors(target, seed)
    chain = torch.ones(4, 4, dtype=torch.bool, device=target.device).tril()
    with use(target):
        out = flash_decode_func(q, k, v, lengths, causal=False, tree_mask=chain)
        expected = flash_decode_func(q, k, v, lengths, causal=True)
    assert_same(out, expected)


@each_target(*TARGETS)
def test_branches_are_calls_of_their_own(target: Target, seed: int) -> None:
    """Two branches of two drafts each behind one cache: each is what it would be alone."""
    q, k, v, _ = tensors(target, seed)
    tree = torch.tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool
    ).to(target.device)
    old = k.size(1) - 4
    with use(target):
        out = flash_decode_func(q, k, v, tree_mask=tree)
        for first in (0, 2):
            rows = [*range(old), old + first, old + first + 1]
            alone = flash_decode_func(q[:, first : first + 2], k[:, rows], v[:, rows])
            assert_same(out[:, first : first + 2], alone)


@each_target(*TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_any_strides(dtype: torch.dtype, target: Target, seed: int) -> None:
    q, k, v, lengths = tensors(target, seed)
    wide = (torch.randn(90, 2, 4, 4, device=target.device) > 0.3).to(dtype)
    bias = wide.permute(1, 3, 2, 0)
    with use(target):
        out = flash_decode_func(q, k, v, lengths, attn_bias=bias)
        expected = flash_decode_func(q, k, v, lengths, attn_bias=bias.contiguous())
    assert torch.equal(out, expected)


@each_target(*TARGETS)
@pytest.mark.parametrize("hiding", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_rows_of_nothing(hiding: float, target: Target, seed: int) -> None:
    """A query all of whose keys a bias hides has no output, and the others keep theirs."""
    q, k, v, lengths = tensors(target, seed)
    bias = torch.zeros(4, 90, device=target.device)
    bias[1] = hiding
    with use(target):
        out, lse = flash_decode_func(q, k, v, lengths, attn_bias=bias, return_softmax_lse=True)
        expected = flash_decode_func(q, k, v, lengths)
    assert (out[:, 1] == 0).all() and (lse[:, :, 1] == -torch.inf).all()
    others = [0, 2, 3]
    assert_same(out[:, others], expected[:, others])


def mask_of(name: str, device: str) -> masks.Mask:
    torch.manual_seed(1)
    seen = (torch.rand(2, 4, 4, 90) < 0.6).to(device)
    ids, ids_k = torch.arange(8).view(2, 4) // 2, torch.randint(0, 4, (2, 90))
    return {
        "window": masks.window(20, 0),
        "prefix": masks.prefix_lm(30),
        "sinks": masks.prefix(5) | masks.window(10, 2),
        "documents": masks.causal() & masks.documents(ids.to(device), ids_k.to(device)),
        "bool": masks.from_bool(seen),
        "blocks": masks.block_sparse(seen[:, :, :1, ::8], 8),
        "not a window": ~masks.window(3, 3),
    }[name]


@each_target(*TARGETS)
@pytest.mark.parametrize(
    "name", ["window", "prefix", "sinks", "documents", "bool", "blocks", "not a window"]
)
def test_masks(name: str, target: Target, seed: int) -> None:
    """A mask is to a cache what it is to the tokens in it."""
    q, k, v, _ = tensors(target, seed)
    mask = mask_of(name, target.device)
    with use(target):
        full = flash_decode_func(q, k, v, causal=False, attn_bias=mask)
        # The last four keys are appended again: what stands there must not count.
        cache = k.clone(), v.clone()
        for x in cache:
            x[:, -4:] = torch.nan
        new = k[:, -4:].clone(), v[:, -4:].clone()
        appended = flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=86, attn_bias=mask)
    expected = flash_attn_func(
        *(x.double().cpu() for x in (q, k, v)), attn_bias=mask_of(name, "cpu")
    )
    for out in (full, appended):
        assert_same(out.cpu(), expected.to(out.dtype))


@each_target(*TARGETS)
@pytest.mark.parametrize("page_size", [0, 10])
def test_the_diagonal_of_a_mask(page_size: int, target: Target, seed: int) -> None:
    """Sequences of several lengths, which the device alone knows, each with its own diagonal."""
    q, k, v, lengths = tensors(target, seed)
    mask = masks.prefix_lm(30) & ~masks.window(2, -1) | masks.window(0, 0)
    pages = {}
    cache = k, v
    if page_size:
        cache = tuple(x.view(18, 10, 2, 64) for x in cache)
        table = torch.arange(18, dtype=torch.int32, device=target.device).view(2, 9)
        pages = dict(block_table=table)
    with use(target):
        out = flash_decode_func(q, *cache, lengths, causal=False, attn_bias=mask, **pages)
    for b, length in enumerate(lengths.tolist()):
        part = (q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length])
        expected = flash_attn_func(*(x.double().cpu() for x in part), attn_bias=mask)
        assert_same(out[b : b + 1].cpu(), expected.to(out.dtype))


def test_columns_of_an_int() -> None:
    """With cache_seqlens an int the bias may have a column for each key, or for each place."""
    q, k, v, _ = tensors(ATEN_CPU, 0)
    new_k, new_v = k[:, :4].clone(), v[:, :4].clone()
    bias = torch.randn(4, 90, dtype=q.dtype)
    results = [
        flash_attn_with_kvcache(
            q, k.clone(), v.clone(), new_k, new_v, cache_seqlens=50, attn_bias=bias[:, :columns]
        )
        for columns in (90, 54)
    ]
    assert torch.equal(*results)
    plain = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=50)
    assert not torch.allclose(results[0], plain)


BIASED, TREE = torch.zeros(4, 90), torch.ones(4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attn_bias=BIASED[:, :89]), r"attn_bias: expected .* broadcasts to \(2, 4, 4, 90\)"),
        (dict(attn_bias=BIASED.int()), "attn_bias: expected a floating dtype or bool, got Int"),
        (dict(attn_bias=masks.from_bool(TREE)), "seen: expected a shape that broadcasts"),
        (dict(attn_bias=masks.documents(torch.zeros(5).int())), "ids: expected"),
        (dict(tree_mask=TREE[:, :3]), r"tree_mask: must have shape \(4, 4\) or \(2, 4, 4\)"),
        (dict(tree_mask=TREE[None]), r"tree_mask: must have shape \(4, 4\) or \(2, 4, 4\)"),
        (dict(tree_mask=TREE.float()), "tree_mask: expected dtype bool, got Float"),
        (dict(tree_mask=TREE, attn_bias=BIASED), "tree_mask: expected without attn_bias"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    q, k, v, lengths = tensors(ATEN_CPU, 0)
    with pytest.raises((RuntimeError, TypeError), match=f"flash_attn: {message}"):
        flash_decode_func(q, k, v, lengths, **options)


def test_a_bias_has_no_gradient() -> None:
    q, k, v, lengths = tensors(ATEN_CPU, 0)
    bias = torch.zeros(4, 90, dtype=q.dtype, requires_grad=True)
    with pytest.raises(RuntimeError, match="flash_attn|not implemented"):
        flash_decode_func(q, k, v, lengths, attn_bias=bias).sum().backward()
    new = k[:, :4].clone(), v[:, :4].clone()
    out = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lengths - 4, attn_bias=bias)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no gradient"):
        out.sum().backward()


@each_target(DECODE_CUDA)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_can_use(dtype: str, target: Target) -> None:
    """A GPU serves them on a kernel."""
    q, k, v, lengths = (x.to(target.device) for x in tensors(ATEN_CPU, 0))
    q, k, v = (x.to(DTYPES[dtype]) for x in (q, k, v))
    bias = torch.zeros(4, 90, device=target.device)
    tree = torch.ones(4, 4, dtype=torch.bool, device=target.device)
    for given in (dict(attn_bias=bias), dict(tree_mask=tree)):
        support = flash_attn.can_use(q, k, v, op="decode", cache_seqlens=lengths, **given)
        assert support.backend == "cuda"
        forward = "attn_bias and tree_mask are not supported"
        assert forward in support.reasons["sm80"] and forward in support.reasons["sm90"]
