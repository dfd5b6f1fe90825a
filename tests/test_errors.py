"""Bad input: an exception at this call that says which argument, what was expected, what came."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from cases import Target, each_target, use

import flash_attn
from flash_attn.ops.rms_norm import RMSNorm
from flash_attn.reference import attention_ref  # noqa: F401  (the package imports without a GPU)


def t(*shape: int, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


def dense(**changes: object) -> dict:
    return dict(q=t(2, 4, 4, 8), k=t(2, 5, 2, 8), v=t(2, 5, 2, 8)) | changes


def varlen(**changes: object) -> dict:
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
    arguments = dict(
        q=t(7, 4, 8), k=t(7, 2, 8), v=t(7, 2, 8), cu_seqlens_q=lengths, cu_seqlens_k=lengths
    )
    return arguments | dict(max_seqlen_q=4, max_seqlen_k=4) | changes


def decode(**changes: object) -> dict:
    return dict(q=t(2, 1, 4, 8), k_cache=t(2, 9, 2, 8), v_cache=t(2, 9, 2, 8)) | changes


@dataclass(frozen=True)
class Bad:
    argument: str
    says: str  # a regular expression that the message matches after the argument's name
    call: dict = field(hash=False)
    error: type[Exception] = RuntimeError

    def __str__(self) -> str:
        return f"{self.argument}: {self.says}"


INT32 = torch.int32
DENSE = [
    Bad("q", r"must have shape \(batch, seqlen, heads, head_dim\).*got 3", dense(q=t(4, 4, 8))),
    Bad("k", r"must have shape .*got 5", dense(k=t(1, 2, 5, 2, 8))),
    Bad(
        "q",
        "only support fp16 and bf16 data type.*got Int",
        dense(
            q=t(2, 4, 4, 8, dtype=INT32), k=t(2, 5, 2, 8, dtype=INT32), v=t(2, 5, 2, 8, dtype=INT32)
        ),
    ),
    Bad(
        "q",
        "expected dtype.*got ComplexFloat",
        dense(**{n: t(2, 4, 2, 8, dtype=torch.complex64) for n in "qkv"}),
    ),
    Bad(
        "k", "expected dtype Float as q has, got Half", dense(k=t(2, 5, 2, 8, dtype=torch.float16))
    ),
    Bad(
        "v",
        "expected dtype Float as q has, got Double",
        dense(v=t(2, 5, 2, 8, dtype=torch.float64)),
    ),
    Bad("k", "expected head_dim 8 as q has, got 16", dense(k=t(2, 5, 2, 16))),
    Bad("q", "head_dim of at least 1, got 0", dense(q=t(2, 4, 4, 0), k=t(2, 5, 2, 0))),
    Bad(
        "k",
        "must divide number of heads in query, got 3 and 4",
        dense(k=t(2, 5, 3, 8), v=t(2, 5, 3, 8)),
    ),
    Bad(
        "k",
        "must divide number of heads in query, got 0 and 4",
        dense(k=t(2, 5, 0, 8), v=t(2, 5, 0, 8)),
    ),
    Bad("v", "expected 2 heads as k has, got 1", dense(v=t(2, 5, 1, 8))),
    Bad("k", "expected batch 2 as q has, got 3", dense(k=t(3, 5, 2, 8))),
    Bad("v", "expected batch 2 as q has, got 1", dense(v=t(1, 5, 2, 8))),
    Bad("v", "expected seqlen 5 as k has, got 6", dense(v=t(2, 6, 2, 8))),
    Bad("v", "expected device cpu as q has, got meta", dense(v=t(2, 5, 2, 8, device="meta"))),
    Bad("q", "dense strided tensor", dense(q=t(2, 4, 4, 8).to_sparse())),
    Bad("dropout_p", r"number in \[0, 1\), got 1", dense(dropout_p=1.0)),
    Bad("dropout_p", r"number in \[0, 1\), got -0.1", dense(dropout_p=-0.1)),
    Bad("dropout_p", r"number in \[0, 1\), got nan", dense(dropout_p=math.nan)),
    Bad("softmax_scale", "finite number above 0, got 0", dense(softmax_scale=0.0)),
    Bad("softmax_scale", "finite number above 0, got -1", dense(softmax_scale=-1.0)),
    Bad("softmax_scale", "finite number above 0, got nan", dense(softmax_scale=math.nan)),
    Bad("softmax_scale", "finite number above 0, got inf", dense(softmax_scale=math.inf)),
    Bad("softcap", "at least 0.*got -2", dense(softcap=-2.0)),
    Bad("softcap", "finite number.*got inf", dense(softcap=math.inf)),
    Bad("window_size", r"at least -1 .*got \(-2, 0\)", dense(window_size=(-2, 0))),
    Bad("window_size", r"at least -1 .*got \(0, -5\)", dense(window_size=(0, -5))),
    Bad("window_size", r"expected \(left, right\)", dense(window_size=(1, 2, 3)), TypeError),
    Bad("window_size", r"expected \(left, right\)", dense(window_size=3), TypeError),
    Bad("window_size", "expected an int, got float", dense(window_size=(1.5, 2)), TypeError),
    Bad(
        "causal_alignment",
        'expected "bottom-right" or "top-left", got \'left\'',
        dense(causal_alignment="left"),
        ValueError,
    ),
    Bad(
        "alibi_slopes",
        "expected dtype float32, got Double",
        dense(alibi_slopes=t(4, dtype=torch.float64)),
    ),
    Bad("alibi_slopes", r"must have shape \(4\) or \(2, 4\), got \[5\]", dense(alibi_slopes=t(5))),
    Bad(
        "alibi_slopes",
        r"must have shape \(4\) or \(2, 4\), got \[3, 4\]",
        dense(alibi_slopes=t(3, 4)),
    ),
    Bad(
        "alibi_slopes",
        "no gradient",
        dense(alibi_slopes=t(4, requires_grad=True)),
        NotImplementedError,
    ),
    Bad("learnable_sink", r"must have shape \(4\), got \[2\]", dense(learnable_sink=t(2))),
    Bad(
        "learnable_sink",
        "expected a floating dtype, got Int",
        dense(learnable_sink=t(4, dtype=INT32)),
    ),
    Bad(
        "attn_bias",
        r"broadcasts to \(2, 4, 4, 5\), got \[2, 4, 5, 4\]",
        dense(attn_bias=t(2, 4, 5, 4)),
    ),
    Bad(
        "attn_bias",
        r"broadcasts to \(2, 4, 4, 5\), got \[3, 1, 1, 5\]",
        dense(attn_bias=t(3, 1, 1, 5)),
    ),
    Bad("attn_bias", r"broadcasts to .*got \[1, 1, 1, 4, 5\]", dense(attn_bias=t(1, 1, 1, 4, 5))),
    Bad("attn_bias", "floating dtype or bool, got Int", dense(attn_bias=t(4, 5, dtype=INT32))),
    Bad(
        "attn_bias",
        "expected device cpu as q has, got meta",
        dense(attn_bias=t(4, 5, device="meta")),
    ),
]
VARLEN = [
    Bad("q", r"must have shape \(total, heads, head_dim\).*got 4", varlen(q=t(2, 7, 4, 8))),
    Bad(
        "cu_seqlens_q",
        r"expected dtype int32, got Long .*\.int\(\)",
        varlen(cu_seqlens_q=torch.tensor([0, 3, 7])),
    ),
    Bad(
        "cu_seqlens_k",
        r"expected dtype int32, got Long .*\.int\(\)",
        varlen(cu_seqlens_k=torch.tensor([0, 3, 7])),
    ),
    Bad(
        "cu_seqlens_k", r"must have shape \(3\), got \[2\]", varlen(cu_seqlens_k=t(2, dtype=INT32))
    ),
    Bad(
        "cu_seqlens_q", r"must have shape .*got \[1, 3\]", varlen(cu_seqlens_q=t(1, 3, dtype=INT32))
    ),
    Bad(
        "cu_seqlens_q",
        r"must have shape \(batch \+ 1\), got \[0\]",
        varlen(cu_seqlens_q=t(0, dtype=INT32)),
    ),
    Bad("cu_seqlens_q", "expected int32 of .*got None", varlen(cu_seqlens_q=None), TypeError),
    Bad("cu_seqlens_k", "expected int32 of .*got None", varlen(cu_seqlens_k=None), TypeError),
    Bad("v", "expected 7 tokens as k has, got 6", varlen(v=t(6, 2, 8))),
    Bad("max_seqlen_q", "at least 0, got -1", varlen(max_seqlen_q=-1)),
    Bad("max_seqlen_k", "at least 0, got -3", varlen(max_seqlen_k=-3)),
    Bad("max_seqlen_q", "expected an int, got float", varlen(max_seqlen_q=4.5), TypeError),
    Bad("seqused_k", r"must have shape \(2\), got \[3\]", varlen(seqused_k=t(3, dtype=INT32))),
    Bad("seqused_q", "expected dtype int32, got Float", varlen(seqused_q=t(2))),
    Bad("leftpad_k", "expected dtype int32, got Long", varlen(leftpad_k=t(2, dtype=torch.int64))),
    Bad(
        "alibi_slopes",
        r"must have shape \(4\) or \(2, 4\), got \[7, 4\]",
        varlen(alibi_slopes=t(7, 4)),
    ),
    Bad("block_table", "expected int32", varlen(block_table=t(2, 3))),
]
DECODE = [
    Bad("q", "must have shape .*got 3", decode(q=t(2, 4, 8))),
    Bad("k_cache", "expected head_dim 8 as q has, got 16", decode(k_cache=t(2, 9, 2, 16))),
    Bad(
        "k_cache",
        "expected batch 2 as q has without cache_batch_idx, got 3",
        decode(k_cache=t(3, 9, 2, 8), v_cache=t(3, 9, 2, 8)),
    ),
    Bad(
        "v_cache",
        "expected batch and capacity 2 and 9 .*got 2 and 8",
        decode(v_cache=t(2, 8, 2, 8)),
    ),
    Bad(
        "cache_seqlens",
        "expected dtype int32, got Long",
        decode(cache_seqlens=torch.tensor([1, 2])),
    ),
    Bad(
        "cache_seqlens",
        r"must have shape \(2\), got \[3\]",
        decode(cache_seqlens=t(3, dtype=INT32)),
    ),
    Bad(
        "block_table",
        "expected dtype int32, got Long",
        decode(block_table=t(2, 3, dtype=torch.int64)),
    ),
    Bad(
        "block_table",
        r"must have shape \(2, max_pages\) without cache_batch_idx, got \[3, 3\]",
        decode(block_table=t(3, 3, dtype=INT32)),
    ),
    Bad("num_splits", r"expected 0 \(chosen\) to 256, got -1", decode(num_splits=-1)),
    Bad("num_splits", r"expected 0 \(chosen\) to 256, got 257", decode(num_splits=257)),
    Bad("softcap", "at least 0", decode(softcap=-1.0)),
    Bad("window_size", "at least -1", decode(window_size=(-9, 0))),
    Bad("softmax_scale", "above 0", decode(softmax_scale=-0.5)),
]
INT8, LONG, HALF = torch.int8, torch.int64, torch.float16
EIGHT = dict(k_cache=t(2, 9, 2, 8, dtype=INT8), v_cache=t(2, 9, 2, 8, dtype=INT8))
DECODE += [
    Bad(
        "k_cache",
        "as q has, float8_e4m3fn or int8, got Half",
        decode(k_cache=t(2, 9, 2, 8, dtype=HALF)),
    ),
    Bad(
        "v_cache", "expected dtype Char as k_cache has, got Float", decode(k_cache=EIGHT["k_cache"])
    ),
    Bad("k_descale", "expected with a cache of .*got one of Float", decode(k_descale=t(2))),
    Bad(
        "k_descale",
        "expected dtype float32, got Double",
        decode(**EIGHT, k_descale=t(2, dtype=torch.float64)),
    ),
    Bad(
        "v_descale",
        r"must have shape \(2\) or \(2, 2\), got \[3\]",
        decode(**EIGHT, v_descale=t(3)),
    ),
    Bad(
        "cache_batch_idx",
        "expected dtype int32, got Long",
        decode(cache_batch_idx=t(2, dtype=LONG)),
    ),
    Bad(
        "cache_batch_idx",
        r"must have shape \(2\), got \[3\]",
        decode(cache_batch_idx=t(3, dtype=INT32)),
    ),
    Bad("cache_leftpad", "expected dtype int32, got Float", decode(cache_leftpad=t(2))),
]


def append(**changes: object) -> dict:
    new = dict(k=t(2, 3, 2, 8), v=t(2, 3, 2, 8), cache_seqlens=t(2, dtype=INT32))
    return decode() | new | changes


TABLES = dict(rotary_cos=t(9, 4), rotary_sin=t(9, 4))
APPEND = [
    Bad(
        "k",
        r"must have shape \(2, 3, 2, 8\) to go into k_cache, got \[2, 3, 1, 8\]",
        append(k=t(2, 3, 1, 8)),
    ),
    Bad(
        "v",
        r"must have shape \(2, 3, 2, 8\) to go into v_cache, got \[2, 2, 2, 8\]",
        append(v=t(2, 2, 2, 8)),
    ),
    Bad("k", r"must have shape .*got \[2, 2, 8\]", append(k=t(2, 2, 8))),
    Bad("k", "expected dtype Float as q has, got Half", append(k=t(2, 3, 2, 8, dtype=HALF))),
    Bad(
        "v", "expected dtype Float as q has, got Char", append(**EIGHT, v=t(2, 3, 2, 8, dtype=INT8))
    ),
    Bad(
        "k",
        r"at most 9 new tokens \(the capacity\), got 10",
        append(k=t(2, 10, 2, 8), v=t(2, 10, 2, 8)),
    ),
    Bad("rotary_sin", "rotary_cos and rotary_sin together", append(rotary_cos=t(9, 4))),
    Bad(
        "rotary_cos",
        "expected dtype Float as q has, got Half",
        append(**TABLES | {"rotary_cos": t(9, 4, dtype=HALF)}),
    ),
    Bad("rotary_cos", "rotary_dim at most 8, got", append(rotary_cos=t(9, 5), rotary_sin=t(9, 5))),
    Bad(
        "rotary_sin",
        r"must have shape \[9, 4\] as rotary_cos has",
        append(**TABLES | {"rotary_sin": t(9, 3)}),
    ),
    Bad(
        "rotary_cos",
        r"at least 9 rows \(the cache's capacity\), got 8",
        append(rotary_cos=t(8, 4), rotary_sin=t(8, 4)),
    ),
    Bad("num_splits", "to 256, got 300", append(num_splits=300)),
]
CALLS = [(flash_attn.flash_attn_func, bad) for bad in DENSE]
CALLS += [(flash_attn.flash_attn_varlen_func, bad) for bad in VARLEN]
CALLS += [(flash_attn.flash_decode_func, bad) for bad in DECODE]
CALLS += [(flash_attn.flash_attn_with_kvcache, bad) for bad in APPEND]


def test_an_expanded_cache_cannot_be_written() -> None:
    bad = Bad("v_cache", "one place in memory for each element", append())
    cache = t(1, 9, 2, 8).expand(2, 9, 2, 8)
    assert_says(bad, lambda: flash_attn.flash_attn_with_kvcache(**append(v_cache=cache)))


def assert_says(bad: Bad, call: Callable[[], object]) -> None:
    with pytest.raises(bad.error, match=f"flash_attn: {bad.argument}: .*{bad.says}") as caught:
        call()
    first_line = str(caught.value).splitlines()[0]
    assert "Exception raised from" not in first_line and len(first_line) < 300


@pytest.mark.parametrize(
    "function, bad", CALLS, ids=lambda x: str(x) if isinstance(x, Bad) else x.__name__
)
def test_message(function: Callable, bad: Bad) -> None:
    assert_says(bad, lambda: function(**bad.call))


def on_meta(arguments: dict) -> dict:
    def move(x: object) -> object:
        moves = isinstance(x, torch.Tensor) and x.layout == torch.strided
        return x.detach().to("meta").requires_grad_(x.requires_grad) if moves else x

    return {name: move(x) for name, x in arguments.items()}


SHAPES = [
    (function, bad)
    for function, bad in CALLS
    if "device" not in bad.says and "strided" not in bad.says and bad.error is not TypeError
]


@pytest.mark.parametrize(
    "function, bad", SHAPES, ids=lambda x: str(x) if isinstance(x, Bad) else x.__name__
)
def test_message_while_tracing(function: Callable, bad: Bad) -> None:
    """The meta kernels check too, so that torch.compile fails where the mistake is."""
    assert_says(bad, lambda: function(**on_meta(bad.call)))


BACKWARD = [
    Bad("dout", r"expected the shape of q .*got \[2, 4, 4, 9\]", dict(dout=t(2, 4, 4, 9))),
    Bad("dout", "dtype Float, got .*Half", dict(dout=t(2, 4, 4, 8, dtype=torch.float16))),
    Bad("out", r"expected the shape of q .*got \[1, 4, 4, 8\]", dict(out=t(1, 4, 4, 8))),
    Bad(
        "softmax_lse",
        r"must have shape \(batch, heads, seqlen_q\), got \[2, 4, 5\]",
        dict(softmax_lse=t(2, 4, 5)),
    ),
    Bad(
        "softmax_lse",
        "expected dtype Float, got Double",
        dict(softmax_lse=t(2, 4, 4, dtype=torch.float64)),
    ),
    Bad("dlse", r"must have shape .*got \[2, 4\]", dict(dlse=t(2, 4))),
]


@pytest.mark.parametrize("bad", BACKWARD, ids=str)
def test_backward_op_message(bad: Bad) -> None:
    optional = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k leftpad_k block_table attn_bias"
    others = "alibi_slopes learnable_sink rng_state dlse mask_tiles mask_rows mask_labels"
    arguments = dict.fromkeys(f"{optional} {others}".split())
    arguments |= dense(dout=t(2, 4, 4, 8), out=t(2, 4, 4, 8), softmax_lse=t(2, 4, 4))
    arguments |= dict(
        max_seqlen_q=4, max_seqlen_k=5, dropout_p=0.0, softmax_scale=None, causal=False
    )
    arguments |= dict(
        window_left=-1, window_right=-1, top_left=False, softcap=0.0, deterministic=False
    )
    arguments |= dict(grad_mask=[True] * 3 + [False] * 2, backend=None)
    assert_says(bad, lambda: torch.ops.flash_attn.bwd(**arguments | bad.call))


def test_dropout_without_a_state() -> None:
    from cases import Case, Problem, op_arguments

    problem = Problem(Case(dropout_p=0.5), 0, "cpu")
    arguments = (
        op_arguments(problem) | problem.float_tensors() | {"rng_state": None, "backend": None}
    )
    with pytest.raises(RuntimeError, match="flash_attn: rng_state: expected a tensor .*got none"):
        torch.ops.flash_attn.fwd(**arguments)


@pytest.mark.parametrize(
    "place",
    [
        [0, 0, 4, 0],
        [0, -1, 4, 0, 0],
        [0, 1, 4, 0, 0],  # heads 1 to 4 of 4
        [0, 0, 3, 0, 0],
        [0, 0, 4, 8, 0],
        [0, 0, 4, 0, 16],
        [0, 0, 4, 1 << 31, 0],
    ],
    ids=str,
)
def test_dropout_place(place: list[int]) -> None:
    from cases import Case, Problem, op_arguments

    problem = Problem(Case(dropout_p=0.5, heads_q=4), 0, "cpu")
    arguments = op_arguments(problem) | problem.float_tensors()
    message = r"flash_attn: dropout_place: expected \(sequence, head, .* got " + re.escape(
        str(place)
    )
    with pytest.raises(RuntimeError, match=message):
        torch.ops.flash_attn.fwd(**arguments, dropout_place=place)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["k", "v", "alibi_slopes", "attn_bias", "learnable_sink"])
def test_other_device(argument: str) -> None:
    call = dense(alibi_slopes=t(4), attn_bias=t(4, 5), learnable_sink=t(4))
    call = {name: x if name == argument else x.cuda() for name, x in call.items()}
    with pytest.raises(
        RuntimeError, match=f"flash_attn: {argument}: expected device cuda:0 .*got cpu"
    ):
        flash_attn.flash_attn_func(**call)


def test_a_gpu_that_is_not_there_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPU's own errors this one alone."""

    def fail(words: str) -> None:
        raise torch.AcceleratorError(words)

    monkeypatch.setattr(torch, "empty", lambda *_, **__: fail("CUDA error: invalid device ordinal"))
    with pytest.raises(TypeError, match="flash_attn: device: expected device or str .*, got 7"):
        RMSNorm(4, device=7)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: fail("CUDA error: out of memory"))
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        RMSNorm(4, device=7)


@pytest.mark.gpu
def test_index_tensor_on_the_cpu() -> None:
    call = {n: x.cuda() if n in ("q", "k", "v") else x for n, x in varlen().items()}
    with pytest.raises(
        RuntimeError, match="flash_attn: cu_seqlens_q: expected device cuda:0.*got cpu"
    ):
        flash_attn.flash_attn_varlen_func(**call)


@each_target(Target("cuda", "sm80"))
def test_no_error_leaves_the_device_unusable(target: Target) -> None:
    q = torch.zeros(1, 4, 2, 8, device="cuda", dtype=torch.float16)
    with use(target):
        with pytest.raises(RuntimeError):
            flash_attn.flash_attn_func(q, q.half(), q.float())
        assert flash_attn.flash_attn_func(q, q, q).isfinite().all()
    torch.cuda.synchronize()
