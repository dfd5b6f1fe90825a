"""Attention in plain PyTorch, written to be read: the tests' oracle, and the road to the algorithm.

attention: naive attention in float64 with every option of the library.
ladder:    from softmax as it stands in the textbook to FlashAttention-2 and split-KV, one idea a
           function.
philox:    dropout's random numbers.
"""

from flash_attn.reference.attention import (
    Conditions,
    Gradients,
    attention_ref,
    attention_ref_grads,
    condition_tensors,
    max_logits_ref,
)
from flash_attn.reference.ladder import (
    Partial,
    combine,
    flash_attention_1,
    flash_attention_2,
    naive_softmax,
    one_pass_attention,
    online_softmax,
    safe_softmax,
    split_kv,
    standard_attention,
)
from flash_attn.reference.philox import (
    dropout_threshold,
    keep_probability,
    philox2x32,
    philox4x32,
    philox_keep_mask,
)

__all__ = [
    "Conditions",
    "Gradients",
    "Partial",
    "attention_ref",
    "attention_ref_grads",
    "combine",
    "condition_tensors",
    "dropout_threshold",
    "flash_attention_1",
    "flash_attention_2",
    "keep_probability",
    "max_logits_ref",
    "naive_softmax",
    "one_pass_attention",
    "online_softmax",
    "philox2x32",
    "philox4x32",
    "philox_keep_mask",
    "safe_softmax",
    "split_kv",
    "standard_attention",
]
