"""Calls of context_parallel, on the ranks of a group and on one process with the whole sequence."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import flash_attn
from flash_attn import attention, context_parallel


@dataclasses.dataclass(frozen=True)
class Case:
    scheme: str = "ring"
    layout: str = "zigzag"
    ranks: int = 4
    dtype: torch.dtype = torch.float64
    batch: int = 2
    seqlen_q: int = 48
    seqlen_k: int = 48
    heads_q: int = 4
    heads_kv: int = 2
    d: int = 8
    d_v: int = 8
    documents: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # cu_seqlens: varlen
    causal: bool = True
    causal_alignment: str = "bottom-right"
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "heads" or "sequences": what slopes differ by
    sink: bool = False
    deterministic: bool = False
    dropout_p: float = 0.0

    def __str__(self) -> str:
        default = Case()
        changes = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ",".join(changes).replace(" ", "") or "default"

    def with_(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def options(self) -> dict:
        names = ("causal", "causal_alignment", "window_size", "softcap", "deterministic")
        names += ("dropout_p",)
        return {name: getattr(self, name) for name in names}


# Of the generator that dropout draws from: one process's, and that of the first rank.
SEED = 11


def seed_ranks(group) -> None:
    """All ranks but the first one draw something else."""
    groups = group if isinstance(group, tuple) else (group,)
    first = all(dist.get_rank(g) == 0 for g in groups)
    torch.manual_seed(SEED if first else 100 + dist.get_rank())


@dataclasses.dataclass
class Whole:
    """The inputs and gradients that flow in, of the whole sequence, and what one process makes."""

    case: Case
    leaves: dict[str, Tensor]
    slopes: Tensor | None
    flow: tuple[Tensor, Tensor]

    @staticmethod
    def draw(case: Case, device: str) -> Whole:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        varlen = case.documents is not None
        lead = () if varlen else (case.batch,)
        sequences = len(case.documents[0]) - 1 if varlen else case.batch
        leaves = {
            "q": normal(*lead, case.seqlen_q, case.heads_q, case.d),
            "k": normal(*lead, case.seqlen_k, case.heads_kv, case.d),
            "v": normal(*lead, case.seqlen_k, case.heads_kv, case.d_v),
        }
        if case.sink:
            leaves["sink"] = normal(case.heads_q)
        slopes = None
        if case.alibi:
            shape = (case.heads_q,) if case.alibi == "heads" else (sequences, case.heads_q)
            slopes = normal(*shape).float().to(device)
        flow = (
            normal(*lead, case.seqlen_q, case.heads_q, case.d_v),
            normal(*lead, case.heads_q, case.seqlen_q),
        )
        leaves = {name: x.to(device, case.dtype) for name, x in leaves.items()}
        wide = torch.promote_types(case.dtype, torch.float32)
        return Whole(
            case, leaves, slopes, (flow[0].to(device, case.dtype), flow[1].to(device, wide))
        )

    def run(self, attend, leaves: dict[str, Tensor], flow: tuple[Tensor, Tensor]):
        """out, lse and the gradients of the leaves, of `attend`(q, k, v, …)."""
        leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
        out, lse, _ = attend(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            alibi_slopes=self.slopes,
            learnable_sink=leaves.get("sink"),
            return_attn_probs=True,
            **self.case.options,
        )
        grads = torch.autograd.grad((out, lse), list(leaves.values()), flow)
        return {"out": out, "lse": lse} | {
            f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)
        }

    def on_one_process(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        def attend(q, k, v, **options):
            if self.case.documents is None:
                return flash_attn.flash_attn_func(q, k, v, **options)
            cu = [torch.tensor(c, dtype=torch.int32, device=q.device) for c in self.case.documents]
            longest = [int(c.diff().max()) for c in cu]
            return flash_attn.flash_attn_varlen_func(q, k, v, *cu, *longest, **options)

        torch.manual_seed(SEED)
        leaves = {name: x.to(dtype or x.dtype) for name, x in self.leaves.items()}
        flow = tuple(x.to(dtype or x.dtype) for x in self.flow)
        # The probabilities that come with dropout would take the call to aten; ranks have none.
        with patch.object(attention, "_wants_probs", return_value=False):
            return self.run(attend, leaves, flow)

    def on_ranks(self, group) -> dict[str, Tensor]:
        """The same of the ranks of `group`: this rank's rows."""
        case, varlen = self.case, self.case.documents is not None
        if case.dropout_p > 0:
            seed_ranks(group)

        def attend(q, k, v, **options):
            options |= dict(group=group, scheme=case.scheme, layout=case.layout)
            if varlen:
                return context_parallel.flash_attn_varlen_func(q, k, v, *case.documents, **options)
            lengths = dict(seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k)
            return context_parallel.flash_attn_func(q, k, v, **lengths, **options)

        leaves = {
            name: x if name == "sink" else self.part(x, group, name)
            for name, x in self.leaves.items()
        }
        flow = (self.part(self.flow[0], group, "out"), self.part(self.flow[1], group, "lse"))
        return self.run(attend, leaves, flow)

    def part(self, x: Tensor, group, name: str) -> Tensor:
        dim = -1 if name == "lse" else x.dim() - 3
        return context_parallel.split(x, group, dim, layout=self.case.layout)

    def pairs(self, ranks: dict[str, Tensor], whole: dict[str, Tensor], group):
        """(name, what the ranks found, what one process found), of this rank's rows; the sink's
        gradient is summed over the ranks."""
        for name, actual in ranks.items():
            if name == "dsink":
                if isinstance(group, tuple):
                    dist.all_reduce(actual, group=group[0])
                    dist.all_reduce(actual, group=group[1])
                else:
                    dist.all_reduce(actual, group=group)
                yield name, actual, whole[name]
            else:
                yield name, actual, self.part(whole[name], group, name)
