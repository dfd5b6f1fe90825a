"""The names, orders and defaults that downstream packages rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import flash_attn
from flash_attn import flash_attn_interface

# flash-attn 2.8.3, flash_attn/flash_attn_interface.py.
TAIL = "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
MIDDLE = f"dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), {TAIL}"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
UPSTREAM = {
    "flash_attn_func": f"q, k, v, {MIDDLE}",
    "flash_attn_kvpacked_func": f"q, kv, {MIDDLE}",
    "flash_attn_qkvpacked_func": f"qkv, {MIDDLE}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {MIDDLE}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {MIDDLE}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {MIDDLE}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,"
        " cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,"
        " causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,"
        " alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
OURS = {
    "flash_attn_func": ["attn_bias", "learnable_sink", "causal_alignment"],
    "flash_attn_varlen_func": ["attn_bias", "learnable_sink", "causal_alignment"],
    "flash_attn_with_kvcache": ["learnable_sink", "k_descale", "v_descale", "batch_invariant"],
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_signature(name: str) -> None:
    """The positional part is upstream's; what is ours is keyword-only with a default; no *args, no
    **kwargs."""
    wanted: dict = {}
    exec(f"def f({UPSTREAM[name]}): ...", {}, wanted)
    expected = inspect.signature(wanted["f"]).parameters
    actual = inspect.signature(getattr(flash_attn, name)).parameters
    positional = [p for p in actual.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [
        (p.name, p.default) for p in expected.values()
    ]
    others = [p for p in actual.values() if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in others)
    assert set(OURS.get(name, [])) <= {p.name for p in others}


@pytest.mark.parametrize("module", ["attention", "packed", "kvcache"])
def test_stubs_say_what_the_functions_say(module: str) -> None:
    """Each public function once for either value of its flag, once for both, and once for whatever
    return_max_logits says."""
    source = Path(flash_attn.__file__).with_name(f"{module}.py")
    written, stubs = (ast.parse(p.read_text()).body for p in (source, source.with_suffix(".pyi")))
    functions = [f for f in written if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
    for function in functions:
        flag = "return_softmax_lse" if module == "kvcache" else "return_attn_probs"
        overloads = [f for f in stubs if getattr(f, "name", None) == function.name]
        described = []
        for f in [function, *overloads]:
            a = f.args
            defaults = [None] * (len(a.args) - len(a.defaults)) + a.defaults + a.kw_defaults
            described.append(
                {
                    x.arg: (ast.unparse(x.annotation), d and ast.unparse(d))
                    for x, d in zip(a.args + a.kwonlyargs, defaults, strict=True)
                }
            )
        assert [d.pop(flag) for d in described] == [
            ("bool", "False"),
            ("Literal[False]", "False"),
            ("Literal[True]", None),
            ("bool", "False"),
            ("bool", "False"),
        ]
        assert [d.pop("return_max_logits") for d in described] == [
            ("bool", "False"),
            ("Literal[False]", "False"),
            ("Literal[False]", "False"),
            ("Literal[False]", "False"),
            ("bool", "False"),
        ]
        assert all(d == described[0] for d in described)


def test_decode_signature() -> None:
    parameters = inspect.signature(flash_attn.flash_decode_func).parameters.values()
    expected = (
        "q, k_cache, v_cache, cache_seqlens=None, *, softmax_scale=None, causal=True,"
        " window_size=(-1, -1), softcap=0.0, alibi_slopes=None, learnable_sink=None,"
        " block_table=None, num_splits=0, return_softmax_lse=False, cache_batch_idx=None,"
        " cache_leftpad=None, k_descale=None, v_descale=None, batch_invariant=False,"
        " return_max_logits=False, shared_prefix=None, attn_bias=None, tree_mask=None"
    )
    wanted: dict = {}
    exec(f"def f({expected}): ...", {}, wanted)
    described = [(p.name, p.kind, p.default) for p in parameters]
    assert described == [
        (p.name, p.kind, p.default) for p in inspect.signature(wanted["f"]).parameters.values()
    ]


IMPORTS = """
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flash_attn import flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward
from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward
from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward
from flash_attn.flash_attn_interface import flash_attn_gpu
from flash_attn.bert_padding import pad_input, unpad_input, index_first_axis, index_put_first_axis
from flash_attn.layers.rotary import apply_rotary_emb, RotaryEmbedding
from flash_attn.modules.mha import FlashSelfAttention, FlashCrossAttention, MHA
from flash_attn.modules.mha import SelfAttention, CrossAttention, ParallelMHA, get_alibi_slopes
from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn, RMSNorm
from flash_attn.ops.rms_norm import RMSNorm, rms_norm, DropoutAddRMSNorm, dropout_add_rms_norm
from flash_attn.flash_attn_interface import FlashAttnFunc, FlashAttnVarlenFunc
from flash_attn.flash_attn_interface import FlashAttnKVPackedFunc, FlashAttnQKVPackedFunc
from flash_attn.flash_attn_interface import FlashAttnVarlenKVPackedFunc
from flash_attn.flash_attn_interface import FlashAttnVarlenQKVPackedFunc
from flash_attn.flash_attn_interface import maybe_contiguous, round_multiple
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn_2_cuda import fwd, bwd, varlen_fwd, varlen_bwd, fwd_kvcache
from flash_attn import use_backend, can_use, flash_decode_func, scaled_dot_product_attention
""".strip().splitlines()


@pytest.mark.parametrize("line", IMPORTS)
def test_what_others_import(line: str) -> None:
    exec(line, {})


@pytest.mark.parametrize(
    "program, window",
    [
        ("transformers 5.23, on CUDA", ">=2.3.3"),
        ("diffusers 0.42", ">=2.6.3"),
        ("deepspeed 0.19", ">=2.7.0"),
        ("megatron-core 0.19", ">=2.7.3"),
        ("verl 0.9", "==2.8.3"),
    ],
)
def test_version_in_the_window_that_others_accept(program: str, window: str) -> None:
    assert SpecifierSet(window).contains(version("flash-attn"), prereleases=True), program


def test_version_compared_as_others_compare_it() -> None:
    """Our label makes the version larger than 2.8.3, so an upper bound must lie above that."""
    ours = Version(flash_attn.__version__)
    assert Version("2.1.1") <= Version("2.7.3") <= ours < Version("2.8.4"), "TransformerEngine 2.20"
    assert not (ours < Version("2.7.1") or ours > Version("2.8.4")), "xformers 0.0.35"
    assert ours.base_version == "2.8.3" and ours.local
    assert [int(part) for part in flash_attn.__version__.split(".")[:2]] == [2, 8]


def test_one_version() -> None:
    assert version("flash-attn") == flash_attn.__version__


def test_path_is_extended() -> None:
    """Another distribution may put flash_attn.cute beside us."""
    assert type(flash_attn.__path__) is list and len(flash_attn.__path__) >= 1
    source = inspect.getsource(flash_attn)
    assert "extend_path(__path__, __name__)" in source


def test_all_is_true() -> None:
    for name in flash_attn.__all__:
        assert getattr(flash_attn, name) is not None
    for name in flash_attn_interface.__all__:
        assert callable(getattr(flash_attn_interface, name))


def public_functions() -> list[tuple[str, Callable]]:
    found = []
    for name in (
        "",
        ".reference",
        ".bert_padding",
        ".integrations.dtensor",
        ".integrations.transformers",
        ".layers.rotary",
        ".losses.cross_entropy",
        ".modules.mha",
        ".ops.rms_norm",
        ".ops.triton.cross_entropy",
        ".ops.triton.layer_norm",
        ".ops.triton.rotary",
    ):
        module = importlib.import_module(f"flash_attn{name}")
        for attribute in getattr(module, "__all__", vars(module)):
            value = getattr(module, attribute)
            if (
                not attribute.startswith("_")
                and callable(value)
                and value.__module__.startswith("flash_attn")
            ):
                found.append((f"{module.__name__}.{attribute}", value))
    return found


@pytest.mark.parametrize(
    "name, function", public_functions(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_documented(name: str, function: Callable) -> None:
    assert inspect.getdoc(function), f"{name} has no docstring"
    source = inspect.getdoc(function)
    if inspect.isfunction(function) and "Arguments:" in source and "Arguments: as" not in source:
        for parameter in inspect.signature(function).parameters:
            assert (
                parameter in source
                or "as in" in source
                or "others" in source
                or "options" in source
            )
