"""Which scheme a call takes by default."""

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from flash_attn._call import as_int, window_sides
from flash_attn._errors import explained
from flash_attn.context_parallel.shards import Group, ranks_of

SCHEMES = ("ring", "all-gather", "ulysses")

Window = Sequence[int | None] | Tensor

# What an H100 computes in a second, what it receives from another of its host or from another host
# (by whether they share one), and what the host needs to launch a step of the ring. The choice of a
# scheme needs no more than their order of magnitude.
OPERATIONS = 600e12
LINK_BYTES = {True: 370e9, False: 45e9}
LAUNCH_SECONDS = 150e-6
# A ring hides what it moves behind steps that compute for so long: on two ranks, where nothing else
# is lost. On more each step is also added to sums in fp32, which then is 3 % of its time.
HIDING_SECONDS, MERGING_SECONDS = 2e-3, 8e-3
# The ring may take so many times as long as all-gather, which copies and holds all ranks' keys.
GATHERING = 1.1


def step_seconds(computing: float, moving: float, launch: float = LAUNCH_SECONDS) -> float:
    """How long a step of the ring takes, which computes, brings and launches at the same time."""
    return max(computing, moving, launch)


@explained(of_torch=True)
def choose_scheme(
    group: Group = None,
    *,
    seqlen_q: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int = 128,
    causal: bool = False,
    window_size: Window = (-1, -1),
    alibi: bool = False,
    rounds_parts: bool = False,
) -> str:
    """The scheme that the calls take by default, from the shape and the links.

    The first that applies:

    1. A group of two dimensions: rules 2, 3 and 5 for the outer one, but never "ulysses".
    2. A window that limits what a query sees: "ring", as only neighbours then exchange anything.
    3. ALiBi: "ulysses" if every rank gets a query head, else "all-gather".
    4. All ranks get equally many query heads, and a key head lies on one rank or on as many as any
       other: "ulysses". Each rank runs the calls of one GPU for some of the heads, and moves
       1 / ranks of q and out for it, a group of heads while another is computed. But the ring
       needs less memory, and loses little where computing with a block of keys takes long: longer
       than bringing it, and 2 ms on two ranks or 8 ms on more, which add to sums in fp32. There it
       is "ring", unless rounds_parts. A rank is taken to compute 600 T/s. It receives 370 GB/s in
       a host, or 45 GB/s between hosts. For 32 causal heads of 128 the two limits are 12k and 24k
       tokens on each rank.
    5. "ring", unless a block of keys takes it more than 1.1 times as long as "all-gather", forward
       and backward together. A step of the ring lasts as long as the longest of computing, bringing
       and a launch (150 µs), in each pass. All-gather is taken to compute and to bring one after
       the other: where steps are short, it has one group of heads. The backward computes 2.5 times
       as much, and brings the keys again and their gradients in fp32. So steps much shorter than
       their launch are better taken at once.

    benchmarks/scaling.py predicts what each scheme costs.

    One host: the ranks have the same global rank // LOCAL_WORLD_SIZE, which torchrun sets; where it
    is not set, all ranks count as one host.

    Arguments: seqlen_q: queries of the whole sequence. alibi: the call has alibi_slopes.
    rounds_parts: the kernels round parts of dk and dv before they are added up, as all but Hopper's
    do on a GPU, and those with softcap, dropout, deterministic or a head_dim above 128. Others: as
    in flash_attn_func.

    Returns: "ring", "all-gather" or "ulysses".
    """
    ranks = ranks_of(group)
    seqlen_q, heads_q = as_int(seqlen_q, "seqlen_q"), as_int(heads_q, "heads_q")
    causal, alibi, rounds_parts = bool(causal), bool(alibi), bool(rounds_parts)
    heads_kv, head_dim = as_int(heads_kv, "heads_kv"), as_int(head_dim, "head_dim")
    left, right = window_sides(window_size)
    two_dimensions = ranks.inner is not None
    if left >= 0 and (causal or right >= 0) and not alibi:
        return "ring"
    if alibi:
        return "ulysses" if not two_dimensions and heads_q >= ranks.size else "all-gather"
    one_host = _in_one_host(ranks.outer)
    rows, inner = seqlen_q / ranks.outer_size, ranks.inner_size
    operations = 4 * rows**2 * heads_q / inner * head_dim * (0.5 if causal else 1.0)
    computing = operations / OPERATIONS
    moving = 4 * rows * max(heads_kv / inner, 1) * head_dim / LINK_BYTES[one_host]
    if not two_dimensions and _deals_evenly(heads_q, heads_kv, ranks.size):
        long = max(moving, HIDING_SECONDS if ranks.size == 2 else MERGING_SECONDS)
        return "ring" if computing >= long and not rounds_parts else "ulysses"
    # Gradients are in fp32, twice as wide as the keys.
    in_steps = step_seconds(computing, moving) + step_seconds(2.5 * computing, 3 * moving)
    at_once = 3.5 * computing + 4 * moving
    return "ring" if in_steps <= GATHERING * at_once else "all-gather"


def _deals_evenly(heads_q: int, heads_kv: int, ranks: int) -> bool:
    """Whether all ranks get as many query heads, and each key head is on as many ranks."""
    return heads_q % ranks == 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0)


def _in_one_host(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group share a host, as far as torchrun told."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return len({rank // per_host for rank in dist.get_process_group_ranks(group)}) == 1
