"""One of two ranks of a call of context_parallel whose other one does not come in time.

    python lonely_rank.py BACKEND SCHEME slow|dead|backward RANK FILE_OF_BOTH

Rank 1 comes later than the group's time-out, dies, or dies between the forward and the backward.
"call T" is printed when a rank makes its call or comes to its backward, T as time.monotonic() has
it, which processes share; "result X" if it ever gets one.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

import flash_attn
from flash_attn import context_parallel

TIME_OUT, LATE = 4.0, 6.0  # seconds
SHAPE = (1, 64, 4, 64)  # of each rank
# Scores are alike, so each output is the mean of the values, which are the number of the call times
# that of the rank plus 1. So the sum of the second call tells whether the other rank's keys are in
# it, and whether they are those of this call.
RIGHT = 2 * 1.5 * 64 * 4 * 64


def main(backend: str, scheme: str, fate: str, rank: str, store: str) -> None:
    # NCCL's watchdog ends the process: without waiting for notes of others, nor a core dump.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "100"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    on_gpu = backend == "nccl"
    device = torch.device("cuda", int(rank)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ones = torch.ones(SHAPE, dtype=torch.bfloat16, device=device)
    flash_attn.flash_attn_func(ones, ones, ones)  # loads kernels, which may take long
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=60),
        device_id=device if on_gpu else None,
    )
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIME_OUT))

    def attend(call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the output, and v."""
        v = (ones * (call * (int(rank) + 1))).requires_grad_()
        out = context_parallel.flash_attn_func(ones, ones, v, group=group, scheme=scheme)
        return out.float().sum(), v

    # The ranks are connected, so that what fails is the call itself, or its backward.
    out, v = attend(1)
    backward = partial(torch.autograd.grad, out, v, retain_graph=True)
    backward()[0].sum().item()
    dist.barrier()
    if rank == "1":
        if fate != "slow":
            os._exit(0)
        time.sleep(LATE)
    print("call", time.monotonic(), flush=True)
    result = backward()[0].sum() if fate == "backward" else attend(2)[0]
    print("result", result.item(), flush=True)
    os._exit(0)  # torch's way to the end may wait for the other rank


if __name__ == "__main__":
    main(*sys.argv[1:])
