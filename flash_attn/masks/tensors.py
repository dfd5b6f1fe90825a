"""What masks ask of tensors, and make of them."""

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def to_dims(x: Tensor, count: int) -> Tensor:
    """With as many dimensions, of which the first ones are new."""
    return x[(None,) * (count - x.dim())]


def in_line(begins: Tensor, seqlen: int) -> Tensor:
    """cu_seqlens of all sequences, one behind the other, of what begins at these rows of each."""
    rows = torch.arange(begins.size(0), dtype=torch.int32, device=begins.device) * seqlen
    return torch.nn.functional.pad(
        (begins + rows[:, None]).flatten(), (0, 1), value=begins.size(0) * seqlen
    )


def has_rows_in_line(x: Tensor) -> bool:
    """Whether the rows of all sequences lie at one distance from each other."""
    return x.size(0) == 1 or x.stride(0) == x.size(1) * x.stride(1)


def can_wait(device: torch.device) -> bool:
    """Whether the host may ask what tensors on this device hold."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if device.type == "meta":
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def is_traced(tensors: tuple[Tensor, ...]) -> bool:
    """Whether these have no numbers, or operations on them are recorded."""
    return detect_fake_mode(tensors) is not None or get_proxy_mode() is not None
