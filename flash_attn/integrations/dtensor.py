"""DTensor's sharding of the ops: over heads and over the batch, forward and backward.

    from flash_attn.integrations import dtensor
    dtensor.register()

Then flash_attn_func and the others take DTensors. Tensor parallelism shards the heads (dimension 2;
1 for varlen), data parallelism the batch; what is sharded otherwise is gathered first. With dropout
everything is, as the mask depends on the global head and row, and all processes have to draw from
generators of the same state. A mask of flash_attn.masks that is more than causal and a window has
tensors, which DTensor refuses beside its own: give such a mask as a bool DTensor.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from flash_attn._log import argument_names

__all__ = ["register"]

_registered = False


def _heads_divide(q, heads_kv: int) -> bool:
    """Whether every part of q's heads has its own heads of k beside it.

    The parts of the mesh over which q's batch is spread do not cut heads.
    """
    parts = 1
    for size, placement in zip(q.mesh.shape, q.placements, strict=True):
        parts *= 1 if placement.is_shard(0) else size
    return heads_kv % parts == 0


def _of_bias(bias, dim: int):
    """The placement of attn_bias where dimension `dim` of (batch, heads, …) is sharded."""
    place = dim + len(bias.shape) - 4
    return Shard(place) if place >= 0 and bias.shape[place] > 1 else Replicate()


def _of_slopes(slopes, dim: int):
    """The placement of a tensor (heads) or (batch, heads) where `dim` of those is sharded."""
    place = dim + slopes.ndim - 2
    return Shard(place) if place >= 0 else Replicate()


def _inputs(call: dict, main: dict, dim: int) -> list:
    """A placement for each argument: that of `main`, else what sharding `dim` makes of it."""
    placements = []
    for name, x in call.items():
        if not hasattr(x, "placements"):
            placement = None
        elif name in main:
            placement = main[name]
        elif name == "attn_bias":
            placement = _of_bias(x, dim)
        elif name in ("alibi_slopes", "learnable_sink", "k_descale", "v_descale"):
            placement = _of_slopes(x, dim)
        elif name.startswith(("seqused", "leftpad", "cache_seqlens", "cache_batch_idx")):
            placement = Shard(0) if dim == 0 else Replicate()
        else:
            placement = Replicate()
        placements.append(placement)
    return placements


def _replicated(call: dict, outputs: int) -> tuple[list, list]:
    inputs = [Replicate() if hasattr(x, "placements") else None for x in call.values()]
    return [Replicate()] * outputs, inputs


def _dims(call: dict) -> list[tuple[int, int, int]]:
    """What can be sharded: (dimension of (batch, heads), that of q, that of the LSE)."""
    q, is_varlen = call["q"], call.get("cu_seqlens_q") is not None
    heads_kv = call["k_cache" if "k_cache" in call else "k"].shape[-2]
    dims = []
    if call.get("dropout_p", 0.0) > 0.0:
        return dims
    if _heads_divide(q, heads_kv):
        dims.append((1, len(q.shape) - 2, 0 if is_varlen else 1))
    if not is_varlen and call.get("block_table") is None:
        dims.append((0, 0, 0))
    return dims


def _call(op: str, arguments: tuple) -> dict:
    """The arguments by name. DTensor leaves out the last ones where they have their defaults."""
    return dict(zip(argument_names(op), arguments, strict=False))


def _max_logits(call: dict, dim: int):
    """One number a head: of a shard of the batch, a part of the maximum."""
    if not call.get("return_max_logits"):
        return Replicate()
    return Shard(0) if dim == 1 else Partial("max")


def _shard_fwd(*arguments):
    call = _call("fwd", arguments)
    shardings = [_replicated(call, 4)]
    for dim, place, place_lse in _dims(call):
        main = dict.fromkeys(("q", "k", "v"), Shard(place))
        probabilities = Shard(dim) if call["return_probs"] else Replicate()
        outputs = [Shard(place), Shard(place_lse), probabilities, _max_logits(call, dim)]
        shardings.append((outputs, _inputs(call, main, dim)))
    return shardings


def _gradient_of(placement, is_wanted: bool):
    """A replicated input of a sharded call collects a part of its gradient from each shard."""
    if not is_wanted:
        return Replicate()
    return Partial() if placement.is_replicate() else placement


def _shard_bwd(*arguments):
    call = _call("bwd", arguments)
    shardings = [_replicated(call, 5)]
    for dim, place, place_lse in _dims(call):
        main = dict.fromkeys(("dout", "out", "q", "k", "v"), Shard(place))
        main |= dict.fromkeys(("dlse", "softmax_lse"), Shard(place_lse))
        inputs = dict(zip(call, _inputs(call, main, dim), strict=True))
        gradients = [
            _gradient_of(inputs[name], is_wanted and inputs[name] is not None)
            for name, is_wanted in zip(
                ("q", "k", "v", "attn_bias", "learnable_sink"), call["grad_mask"], strict=True
            )
        ]
        shardings.append((gradients, list(inputs.values())))
    return shardings


def _decodings(call: dict) -> list[tuple[list, list]]:
    shardings = []
    names = ("q", "k_cache", "v_cache", "k", "v")
    for dim, place, _ in _dims(call):
        if dim == 0 and call["cache_batch_idx"] is not None:
            continue
        main = dict.fromkeys(names, Shard(place))
        outputs = [Shard(place), Shard(dim), _max_logits(call, dim)]
        shardings.append((outputs, _inputs(call, main, dim)))
    return shardings


def _shard_decode(*arguments):
    call = _call("decode", arguments)
    return [_replicated(call, 3), *_decodings(call)]


def _shard_kvcache(*arguments):
    call = _call("kvcache", arguments)
    expected = (
        "both replicated, or sharded over heads or (not paged, without cache_batch_idx) over the"
        " batch"
    )
    shardings = [_replicated(call, 3), *_decodings(call)]
    return _fitting(shardings, call, ("k_cache", "v_cache"), expected)


def _fitting(shardings: list, call: dict, written: tuple[str, ...], expected: str) -> list:
    """Those that leave what the op writes to where it lies."""
    given = [name for name in written if call[name] is not None]
    placements = {p for name in given for p in call[name].placements}
    at = [list(call).index(name) for name in given]
    fitting = [s for s in shardings if placements <= {s[1][i] for i in at}]
    if not fitting:
        raise RuntimeError(
            f"flash_attn: {', '.join(written)}: expected {expected}, got placements {placements}"
        )
    return fitting


def _by_dim(call: dict, names: tuple[str, ...], dim: int) -> dict:
    """These arguments, of which pages have another rank than queries, sharded over heads or
    batch."""
    given = {name: call[name] for name in names if call[name] is not None}
    return {name: Shard(len(x.shape) - 2 if dim == 1 else 0) for name, x in given.items()}


def _upstream_forward(op: str) -> Callable:
    """Of upstream's op: out, softmax_lse, and two that are no one's part."""

    def shard(*arguments):
        call = _call(op, arguments)
        shardings = [_replicated(call, 4)]
        for dim, place, place_lse in _dims(call):
            outputs = [Shard(place), Shard(place_lse), Replicate(), Replicate()]
            main = _by_dim(call, ("q", "k", "v"), dim)
            shardings.append((outputs, _inputs(call, main, dim)))
        return shardings

    return shard


def _upstream_backward(op: str) -> Callable:
    """Of upstream's op, which writes dq, dk and dv and returns softmax_d."""

    def shard(*arguments):
        call = _call(op, arguments)
        written = ("dq", "dk", "dv")
        shardings = [_replicated(call, 1)]
        for dim, _, place_lse in _dims(call):
            main = _by_dim(call, ("dout", "q", "k", "v", "out", *written), dim)
            main["softmax_lse"] = Shard(place_lse)
            shardings.append(([Shard(place_lse)], _inputs(call, main, dim)))
        expected = "all replicated, or sharded over heads or (not varlen) over the batch"
        return _fitting(shardings, call, written, expected)

    return shard


def _shard_rng_state(like):
    """Each process draws by itself, whatever its shard is."""
    shards = [([Replicate()], [Shard(dim)]) for dim in range(len(like.shape))]
    return [([Replicate()], [Replicate()]), *shards]


def register() -> None:
    """Teaches DTensor to shard the ops. A second call does nothing."""
    global _registered
    if _registered:
        return
    ops = torch.ops.flash_attn
    register_sharding(ops.fwd.default)(_shard_fwd)
    register_sharding(ops.bwd.default)(_shard_bwd)
    register_sharding(ops.decode.default)(_shard_decode)
    register_sharding(ops.kvcache.default)(_shard_kvcache)
    register_sharding(ops.rng_state.default)(_shard_rng_state)
    for infix in ("", "_varlen"):
        forward, backward = (f"_flash_attn{infix}_{name}" for name in ("forward", "backward"))
        register_sharding(getattr(ops, forward).default)(_upstream_forward(forward))
        register_sharding(getattr(ops, backward).default)(_upstream_backward(backward))
    _registered = True
