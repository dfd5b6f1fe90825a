"""A model of transformers on flash_attn.context_parallel: two processes on CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from flash_attn.context_parallel import join, position_ids, split, transformers_attention

RANKS, TOKENS = 2, 52  # zigzag: pieces of 13


def check(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(config.vocab_size, (2, TOKENS))
    whole = model(input_ids=ids, use_cache=False).logits
    flow = torch.randn_like(whole)
    whole.backward(flow)
    weight = model.model.layers[0].self_attn.k_proj.weight
    expected, weight.grad = weight.grad.clone(), None

    AttentionInterface.register("context_parallel", transformers_attention())
    model.set_attn_implementation("context_parallel")
    positions = position_ids(TOKENS).expand(2, -1)
    part = model(input_ids=split(ids), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(join(part.detach()), whole, rtol=1e-4, atol=1e-5)
    part.backward(split(flow))
    dist.all_reduce(weight.grad)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-5)
    dist.barrier()
    os._exit(0)  # torch's own end of gloo's threads may abort a process that has passed


def test_llama_over_ranks(tmp_path: Path) -> None:
    """The logits of all tokens, and a gradient through both layers, are those of one process."""
    processes.start_processes(
        check, (tmp_path / "store",), nprocs=RANKS, start_method="spawn", join=True
    )
