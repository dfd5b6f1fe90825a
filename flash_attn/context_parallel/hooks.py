"""Other people's ways to the same calls: torch's context_parallel, and transformers."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_attn.context_parallel.interface import flash_attn_func
from flash_attn.context_parallel.shards import Group, check_layout

# Where torch 2.11 has what its context_parallel calls when a block begins and ends.
_TORCH_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_BEGIN = "_enable_context_parallel_dispatcher_impl"
_END = "_disable_context_parallel_dispatcher_impl"


@contextmanager
def serve_torch(*, scheme: str | None = None) -> Iterator[None]:
    """Inside, torch.distributed.tensor.experimental.context_parallel runs on these functions.

        with serve_torch(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch still shards the buffers, zigzag where its load balancing is on, and replaces
    scaled_dot_product_attention while the block lasts, by these functions over the mesh. They serve
    CPUs and gloo, too, and GQA.

    Arguments:
        scheme: as in flash_attn_func. Default: `choose_scheme`.

    Raises:
        NotImplementedError: this torch has no such place to hook in (it is private to torch, and
            known of 2.11); inside, a call of scaled_dot_product_attention with attn_mask.
    """
    torch_side = _torch_side()
    restore = F.scaled_dot_product_attention
    begin, end = getattr(torch_side, _BEGIN), getattr(torch_side, _END)

    def replace(seq_dim: int, mesh: DeviceMesh) -> None:
        balanced = torch_side._cp_options.enable_load_balance
        layout = "zigzag" if balanced else "contiguous"
        F.scaled_dot_product_attention = _sdpa_over(mesh, layout, scheme)

    def put_back() -> None:
        F.scaled_dot_product_attention = restore

    setattr(torch_side, _BEGIN, replace)
    setattr(torch_side, _END, put_back)
    try:
        yield
    finally:
        setattr(torch_side, _BEGIN, begin)
        setattr(torch_side, _END, end)
        put_back()


def _torch_side():
    """torch's module, if it is as the hook knows it."""
    try:
        module = importlib.import_module(_TORCH_MODULE)
        begin = list(inspect.signature(getattr(module, _BEGIN)).parameters)
        end = list(inspect.signature(getattr(module, _END)).parameters)
        known = (begin, end) == (["seq_dim", "mesh"], [])
        known = known and hasattr(module._cp_options, "enable_load_balance")
    except (ImportError, AttributeError):
        known = False
    if not known:
        raise NotImplementedError(
            "flash_attn: serve_torch: expected torch's context_parallel as torch 2.11 has it"
            f" ({_TORCH_MODULE}.{_BEGIN}), got torch {torch.__version__}; call"
            " flash_attn.context_parallel.flash_attn_func instead"
        )
    return module


def _sdpa_over(mesh: DeviceMesh, layout: str, scheme: str | None) -> Callable[..., Tensor]:
    """scaled_dot_product_attention of (batch, heads, rows of this rank, d)."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _refuse_mask(attn_mask, "attn_mask")
        out = flash_attn_func(
            *(x.transpose(1, 2) for x in (query, key, value)),
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            causal_alignment="top-left",
            group=mesh,
            scheme=scheme,
            layout=layout,
        )
        return out.transpose(1, 2)

    return scaled_dot_product_attention


def transformers_attention(
    group: Group = None, *, scheme: str | None = None, layout: str = "zigzag"
) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers, over the ranks that share each sequence.

        AttentionInterface.register("context_parallel", transformers_attention(group))
        model.set_attn_implementation("context_parallel")

    The model is then called with this rank's tokens, `split(input_ids, group)`, and their
    `position_ids`. Training and scoring whole sequences only: no padding mask and no cache.

    Arguments: as in flash_attn_func; all ranks hold as many tokens.

    Returns: a function of (module, query, key, value, attention_mask, …) in transformers' form:
        query (batch, heads, rows, d) → (out (batch, rows, heads, d), None). It follows scaling,
        dropout, is_causal (default: module.is_causal), sliding_window, softcap and s_aux (sinks).

    Raises: ValueError: layout; the function: NotImplementedError for an attention_mask.
    """
    check_layout(layout)

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        _refuse_mask(attention_mask, "attention_mask")
        causal = module.is_causal if is_causal is None else is_causal
        side = -1 if sliding_window is None else sliding_window - 1  # the token itself counts
        out = flash_attn_func(
            *(x.transpose(1, 2) for x in (query, key, value)),
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=causal,
            window_size=(side, side),
            softcap=softcap or 0.0,
            learnable_sink=s_aux,
            group=group,
            scheme=scheme,
            layout=layout,
        )
        return out, None

    return attend


def _refuse_mask(mask: Tensor | None, argument: str) -> None:
    if mask is not None:
        raise NotImplementedError(
            f"flash_attn: {argument}: expected None in context_parallel (a mask grows with the"
            " square of the sequence), got a tensor"
        )
