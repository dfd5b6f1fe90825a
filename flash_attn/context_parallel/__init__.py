"""One sequence over many GPUs, on torch.distributed."""

from flash_attn.context_parallel.merge import merge_attention

__all__ = ["merge_attention"]
