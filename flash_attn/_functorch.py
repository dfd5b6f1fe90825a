"""The gradient formula in Python, for torch.func's transforms; and what refuses forward-mode AD.

They refuse autograd functions of C++. What runs inside is the same: the ops `fwd` and `bwd`.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn._library import C
from flash_attn._log import argument_names

is_active = torch._C._are_functorch_transforms_active

# Where the inputs that have a gradient stand among the arguments of `fwd`, in grad_mask's order.
DIFFERENTIABLE = (0, 1, 2, 9, 11)  # q, k, v, attn_bias, learnable_sink
ARGUMENTS_OF_BWD = 26  # as many of them `bwd` takes too: all but the last four


def _refusal(name: str) -> NotImplementedError:
    """In the words of bindings/autograd.cpp."""
    return NotImplementedError(
        f"flash_attn: {name}: forward-mode AD is not implemented, expected a tensor without a"
        " tangent, got one with"
    )


def check_no_tangents(**inputs: Tensor | None) -> None:
    """For functions whose inputs reach no op of bindings/autograd.cpp as they are: torch's custom
    ops and collectives drop a tangent in silence.

    A trace sees no tangents, so none goes on inside a dual level. torch.compile then calls in
    eager; with fullgraph it refuses the call in words of its own.
    """
    unseen = torch.compiler.is_compiling() and forward_ad._current_level >= 0
    for name, x in inputs.items():
        if x is not None and (unseen or forward_ad.unpack_dual(x).tangent is not None):
            raise _refusal(name)


class _Attention(torch.autograd.Function):
    """fwd(*arguments) with bwd as its gradient; vmap maps both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return C.fwd(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        out, softmax_lse, probabilities, max_logits = output
        ctx.mark_non_differentiable(probabilities, max_logits)
        ctx.set_materialize_grads(False)
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors, out, softmax_lse)
        ctx.values = [None if isinstance(x, Tensor) else x for x in inputs]

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        *tensors, out, softmax_lse = ctx.saved_tensors
        arguments = [
            value if tensor is None else tensor
            for tensor, value in zip(tensors, ctx.values, strict=True)
        ]
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = [ctx.needs_input_grad[i] for i in DIFFERENTIABLE]
        given, (place, backend) = arguments[:ARGUMENTS_OF_BWD], arguments[-2:]
        options = (wanted, place, backend, False, False)  # no gradient in fp32
        gradients = C.bwd(dout, dlse, out, softmax_lse, *given, *options)
        result = [None] * len(arguments)
        for i, is_wanted, gradient in zip(DIFFERENTIABLE, wanted, gradients, strict=True):
            result[i] = gradient if is_wanted else None
        return tuple(result)

    @staticmethod
    def jvp(ctx, *tangents):
        named = zip(argument_names("fwd"), tangents, strict=True)
        name = next((name for name, tangent in named if tangent is not None), "q")
        raise _refusal(name)


def fwd(*arguments):
    """The op `fwd` inside a transform."""
    return _Attention.apply(*arguments)
