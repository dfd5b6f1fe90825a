"""Which backend serves every feature, dtype and head dim: the questions, whoever answers them.

``can_use`` answers them for a device that is here (``python -m flash_attn info``), and
``benchmarks/support.py`` for GPUs that are not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Answers change behind these head dims alone; tests/test_support.py asks about all others.
HEAD_DIMS = (64, 128, 256, 512, 576, 1024)
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
OPS = {"fwd": "forward", "bwd": "backward", "decode": "decode"}
BATCH, HEADS, KV_HEADS, CAPACITY = 8, 32, 8, 8192  # of a call of decode


@dataclass(frozen=True)
class Feature:
    """What a call asks for.

    fields: of csrc's CallShape, which it sets.
    cache: dtype of the caches, where it is not that of q.
    """

    op: str
    name: str
    fields: tuple[str, ...] = ()
    cache: str | None = None
    tokens: int = 1


TERMS = (
    ("causal, windows, GQA, LSE", ()),
    ("varlen, seqused, leftpad", ("ragged",)),
    ("sinks", ("sink",)),
    ("softcap", ("softcap",)),
    ("ALiBi", ("alibi",)),
    ("ALiBi with softcap", ("alibi", "softcap")),
    ("dropout", ("dropout",)),
    ("bias of q's dtype", ("bias", "dense_bias")),
    ("bias of another dtype", ("bias",)),
    ("bias of the keys alone", ("bias", "dense_bias", "bias_of_keys")),
    ("mask of tiles", ("bias", "tile_mask", "bool_mask")),
)
FEATURES = (
    *(Feature("fwd", *term) for term in TERMS),
    Feature("fwd", "largest logits", ("max_logits",)),
    Feature("fwd", "largest logits with softcap", ("max_logits", "softcap")),
    Feature("fwd", "largest logits with dropout", ("max_logits", "dropout")),
    Feature("fwd", "largest logits with a bias", ("max_logits", "bias")),
    Feature(
        "fwd",
        "largest logits with a mask of tiles",
        ("max_logits", "bias", "tile_mask", "bool_mask"),
    ),
    Feature("fwd", "S_dmask of dropout", ("return_probs", "dropout")),
    *(Feature("bwd", *term) for term in TERMS),
    Feature("bwd", "gradient of a bias", ("bias", "dense_bias", "bias_gradient")),
    Feature(
        "bwd",
        "gradient of a bias of the keys alone",
        ("bias", "dense_bias", "bias_of_keys", "bias_gradient"),
    ),
    Feature("bwd", "deterministic", ("deterministic",)),
    Feature("bwd", "deterministic with softcap", ("deterministic", "softcap")),
    Feature(
        "bwd",
        "deterministic with a mask of tiles",
        ("deterministic", "bias", "tile_mask", "bool_mask"),
    ),
    Feature("decode", "one new token"),
    Feature("decode", "pages", ("paged",)),
    Feature("decode", "sinks", ("sink",)),
    Feature("decode", "softcap", ("softcap",)),
    Feature("decode", "ALiBi", ("alibi",)),
    Feature("decode", "bias or tree", ("bias",)),
    Feature("decode", "largest logits", ("max_logits",)),
    Feature("decode", "largest logits with softcap", ("max_logits", "softcap")),
    Feature("decode", "largest logits with a bias", ("max_logits", "bias")),
    Feature("decode", "batch_invariant", ("batch_invariant",)),
    Feature("decode", "shared prefix", ("paged", "shares_prefix")),
    Feature("decode", "values that lie in their keys", ("values_in_keys",)),
    Feature("decode", "cache of fp8", cache="fp8"),
    Feature("decode", "cache of int8", cache="int8"),
    Feature("decode", "1024 new tokens", tokens=1024),
    Feature("decode", "1024 new tokens, pages", ("paged",), tokens=1024),
    Feature("decode", "1024 new tokens, softcap", ("softcap",), tokens=1024),
)

# The backend of a call of a feature in a dtype at a head dim, as named(). None: no such call.
Ask = Callable[[Feature, str, int], str | None]


def named(backend: str, plan: str) -> str:
    """With a star, where it passes over the tiles that a mask hides."""
    return f"{backend}*" if "hidden tiles skipped" in plan else backend


def ranges(ask: Ask, feature: Feature, dtype: str) -> tuple[tuple[str, int], ...]:
    """The backends with the largest head dim that each serves, the smallest first."""
    found: list[tuple[str, int]] = []
    for head_dim in HEAD_DIMS:
        backend = ask(feature, dtype, head_dim)
        if backend is None:
            return ()
        if found and found[-1][0] == backend:
            found.pop()
        found.append((backend, head_dim))
    return tuple(found)


def in_words(found: tuple[tuple[str, int], ...], quote: str = "") -> str:
    """ "sm90 to 256, sm80 to 512": that aten serves larger head dims goes without saying."""
    if not found:
        return "–"
    names = [f"{quote}{backend}{quote}" for backend, _ in found]
    if len(found) == 1:
        return names[0]
    ends = [f"{name} to {head_dim}" for name, (_, head_dim) in zip(names, found, strict=True)]
    return ", ".join(ends[:-1] if found[-1][0] == "aten" else [*ends[:-1], names[-1]])


def alike(cells: dict[str, object]) -> list[tuple[tuple[str, ...], object]]:
    """The names whose cells are the same, together."""
    groups: dict[object, tuple[str, ...]] = {}
    for name, cell in cells.items():
        groups[cell] = (*groups.get(cell, ()), name)
    return [(names, cell) for cell, names in groups.items()]


def table(op: str, asks: tuple[Ask, ...]) -> list[tuple[str, str, tuple[tuple, ...]]]:
    """Rows (features, dtypes, the ranges() of each who is asked), those alike in one."""
    features = [feature for feature in FEATURES if feature.op == op]
    cells = {
        (feature.name, dtype): cell
        for dtype in DTYPES
        for feature in features
        if any(cell := tuple(ranges(ask, feature, dtype) for ask in asks))
    }
    # Dtypes for which a feature makes no difference have a row for all.
    same = {
        dtype: kinds.pop()
        for dtype in DTYPES
        if len(kinds := {cell for (_, of), cell in cells.items() if of == dtype}) == 1
    }
    found: dict[tuple[tuple[str, ...], object], tuple[str, ...]] = {}
    for feature in features:
        of_feature = {d: cells[feature.name, d] for d in DTYPES if (feature.name, d) in cells}
        for dtypes, cell in alike({d: c for d, c in of_feature.items() if d not in same}):
            found[dtypes, cell] = (*found.get((dtypes, cell), ()), feature.name)
    order = list(DTYPES)
    rows = sorted(found.items(), key=lambda row: order.index(row[0][0][0]))
    return [
        *(("; ".join(names), ", ".join(dtypes), cell) for (dtypes, cell), names in rows),
        *(("every feature", ", ".join(dtypes), cell) for dtypes, cell in alike(same)),
    ]


def ask_here(device: torch.device) -> Ask:
    """By can_use, about calls on a device. The tensors take no memory worth mentioning."""
    import flash_attn

    def ask(feature: Feature, dtype: str, head_dim: int) -> str | None:
        if is_no_call(feature, dtype):
            return None
        *tensors, options = call_of(feature, DTYPES[dtype], head_dim, device)
        support = flash_attn.can_use(*tensors, op=feature.op, **options)
        return named(support.backend, support.plan)

    return ask


def is_no_call(feature: Feature, dtype: str) -> bool:
    """Caches of 8 bits are for queries of 16."""
    return feature.cache is not None and dtype not in ("fp16", "bf16")


def call_of(
    feature: Feature, dtype: torch.dtype, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, dict]:
    """q, k, v and the options of can_use; nothing is read from them."""
    rows = 128
    asked = set(feature.fields)

    def tensor(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty((1,) * (len(shape) - 1) + shape[-1:], dtype=of, device=device).expand(
            shape
        )

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    options: dict = {}
    if "softcap" in asked:
        options["softcap"] = 50.0
    if "sink" in asked:
        options["learnable_sink"] = tensor(HEADS, of=torch.float32)
    if "alibi" in asked:
        options["alibi_slopes"] = tensor(HEADS, of=torch.float32)
    if "max_logits" in asked:
        options["return_max_logits"] = True
    if feature.op == "decode":
        caches = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        of = caches.get(feature.cache, dtype)
        q = tensor(BATCH, feature.tokens, HEADS, head_dim)
        options["cache_seqlens"] = numbers(BATCH)
        if "batch_invariant" in asked:
            options["batch_invariant"] = True
        if "bias" in asked:
            options["attn_bias"] = tensor(HEADS, feature.tokens, CAPACITY)
        outer, page = (BATCH, CAPACITY), 16
        if "paged" in asked:
            outer = CAPACITY, page
            options["block_table"] = numbers(BATCH, CAPACITY // page)
        if "shares_prefix" in asked:
            options["shared_prefix"] = _prefix(numbers)
        k, v = (tensor(*outer, KV_HEADS, head_dim, of=of) for _ in "kv")
        if "values_in_keys" in asked:
            v = k[..., : head_dim - head_dim // 64 * 8]
        return q, k, v, options
    q, k = tensor(1, rows, HEADS, head_dim), tensor(1, rows, KV_HEADS, head_dim)
    if "dropout" in asked:
        options["dropout_p"] = 0.1
    if "return_probs" in asked:
        options["return_attn_probs"] = True
    if "deterministic" in asked:
        options["deterministic"] = True
    if "tile_mask" in asked:
        options["attn_bias"] = _mask()
    elif "bias" in asked:
        shape = (1, HEADS, 1 if "bias_of_keys" in asked else rows, rows)
        of = dtype if "dense_bias" in asked else _other_than(dtype)
        bias = torch.empty(shape, dtype=of, device=device)
        options["attn_bias"] = bias.requires_grad_("bias_gradient" in asked)
    if "ragged" in asked:
        options["seqused_k"] = numbers(1)
    return q, k, k, options


def _other_than(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float32 else torch.float32


def _mask():
    """One that is neither causal, a window, nor packed documents, and hides whole tiles."""
    from flash_attn import masks

    return masks.prefix_lm(64)


def _prefix(numbers: Callable[..., Tensor]):
    from flash_attn import SharedPrefix

    return SharedPrefix(numbers(BATCH), numbers(BATCH))
