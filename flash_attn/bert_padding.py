"""Between padded batches (batch, seqlen, …) and the varlen layout (total, …). All differentiable.

Finding the tokens of a mask needs their number on the host: each unpad function synchronises once.
"""

import torch
from einops import rearrange  # noqa: F401  (verl imports it from here)
from torch import Tensor
from torch.nn.functional import pad

from flash_attn._errors import explain, shown
from flash_attn._functions import applied


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]: rows of (n, …) by int32 or int64 indices (m) → (m, …)."""
    try:
        _check_indices(indices, "input", input)
        return input.index_select(0, indices)
    except Exception as error:
        explain(error, index_first_axis, locals(), of_torch=True)
        raise


def _put_rows(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    _check_indices(indices, "values", values)
    return values.new_zeros(rows, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, …), values (m, …) in the rows indices (int32 or int64, distinct)."""
    try:
        return _put_rows(values, indices, first_axis_dim)
    except Exception as error:
        explain(error, index_put_first_axis, locals(), of_torch=True)
        raise


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(input[indices], input); gradients through both add up in input."""
    try:
        _check_indices(indices, "input", input)
        return input.index_select(0, indices), input
    except Exception as error:
        explain(error, index_first_axis_residual, locals(), of_torch=True)
        raise


IndexFirstAxis = applied("IndexFirstAxis", index_first_axis)
IndexPutFirstAxis = applied("IndexPutFirstAxis", index_put_first_axis)
IndexFirstAxisResidual = applied("IndexFirstAxisResidual", index_first_axis_residual)


def _check_indices(indices: Tensor, name: str, rows: Tensor) -> None:
    is_index = indices.dtype in (torch.int32, torch.int64) and indices.dim() == 1
    if not is_index or indices.device != rows.device:
        raise RuntimeError(
            f"flash_attn: indices: expected int32 or int64 of one dimension on {rows.device} as"
            f" {name} has, got {shown(indices)} on {indices.device}"
        )


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    fits = mask.shape == hidden_states.shape[:2] and mask.device == hidden_states.device
    is_int = not (mask.is_floating_point() or mask.is_complex())
    if not (fits and is_int and mask.layout == torch.strided):
        raise RuntimeError(
            f"flash_attn: {name}: expected bool or int of shape {tuple(hidden_states.shape[:2])} on"
            f" {hidden_states.device}, as hidden_states has, got {shown(mask)} on {mask.device}"
        )


def _cu_seqlens(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drops the padding.

    Arguments:
        hidden_states: (batch, seqlen, …).
        attention_mask: bool or int (batch, seqlen), 1: a token.
        unused_mask: bool or int (batch, seqlen), 1: a token that takes up room but does not count.

    Returns:
        (total, …) tokens of both masks; int64 (total) their rows in (batch * seqlen, …); cu_seqlens
        int32 (batch + 1); the longest length (int); seqused int32 (batch), tokens of attention_mask
        alone.
    """
    try:
        _check_mask("attention_mask", attention_mask, hidden_states)
        if unused_mask is not None:
            _check_mask("unused_mask", unused_mask, hidden_states)
        taken = attention_mask if unused_mask is None else attention_mask + unused_mask
        lengths = taken.sum(-1, dtype=torch.int32)
        seqused = attention_mask.sum(-1, dtype=torch.int32)
        indices = taken.flatten().nonzero().flatten()
        tokens = hidden_states.flatten(0, 1).index_select(0, indices)
        return tokens, indices, _cu_seqlens(lengths), int(lengths.max()), seqused
    except Exception as error:
        explain(error, unpad_input, locals(), of_torch=True)
        raise


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drops the padding of rows that hold several short sequences one after the other.

    Arguments:
        hidden_states: (batch, seqlen, …).
        attention_mask_in_length: int (batch, seqlen): the lengths of a row's sequences, then zeros.
            A row of two sequences, of 2 and 3 tokens, in seqlen 6: [2, 3, 0, 0, 0, 0]. With causal
                attention:

                1 0 0 0 0
                1 1 0 0 0
                0 0 1 0 0
                0 0 1 1 0
                0 0 1 1 1

    Returns:
        (total, …) tokens; int64 (total) their rows in (batch * seqlen, …); cu_seqlens int32
        (sequences + 1); the longest sequence (int).
    """
    try:
        _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
        used = attention_mask_in_length.sum(-1, keepdim=True)
        position = torch.arange(attention_mask_in_length.size(-1), device=used.device)
        indices = (position < used).flatten().nonzero().flatten()
        lengths = attention_mask_in_length.flatten()
        lengths = lengths[lengths > 0]
        tokens = hidden_states.flatten(0, 1).index_select(0, indices)
        return tokens, indices, _cu_seqlens(lengths), int(lengths.max())
    except Exception as error:
        explain(error, unpad_input_for_concatenated_sequences, locals(), of_torch=True)
        raise


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse: (total, …) tokens to their rows of (batch, seqlen, …), zeros elsewhere.

    indices: int32 or int64 (total), distinct, as unpad_input returns them.
    """
    try:
        return _put_rows(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    except Exception as error:
        explain(error, pad_input, locals(), {"values": "hidden_states"}, of_torch=True)
        raise
