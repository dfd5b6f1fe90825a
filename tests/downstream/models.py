"""Tiny models of transformers with random weights, each with one thing that the others lack."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 61
# Scores far from 0, so that a wrong mask, scale or softcap changes the logits.
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(intermediate_size=96, max_position_embeddings=64, initializer_range=0.3)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)


@dataclass(frozen=True)
class Model:
    """An architecture; `kind` is its class's name without "Config"."""

    name: str
    kind: str
    head: str
    options: dict = field(default_factory=dict)
    generates: bool = True
    is_encoder_decoder: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, attention: str, device: str, dtype: torch.dtype, **changes) -> PreTrainedModel:
        """The same weights whatever `attention` is."""
        config = getattr(transformers, f"{self.kind}Config")(**SIZES | self.options | changes)
        torch.manual_seed(1)
        model = getattr(transformers, f"{self.kind}{self.head}")._from_config(
            config, attn_implementation=attention
        )
        return model.to(device, dtype).eval()

    def inputs(self, device: str, side: str | None) -> dict[str, torch.Tensor]:
        """Three sequences of 19 tokens, two of them shorter where `side` says where the padding
        is."""
        tokens = torch.randint(2, VOCABULARY, (3, 19), device=device)
        mask = torch.ones_like(tokens)
        if side is not None:
            for row, padding in ((0, 7), (2, 3)):
                (mask[row, :padding] if side == "left" else mask[row, -padding:]).zero_()
        inputs = dict(input_ids=tokens, attention_mask=mask)
        if self.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens[:, :11].flip(1)
        return inputs


MODELS = [
    Model("llama, GQA", "Llama", "ForCausalLM", dict(num_key_value_heads=2)),
    Model(
        "mistral, window",
        "Mistral",
        "ForCausalLM",
        dict(num_key_value_heads=2, sliding_window=5),
    ),
    Model(
        "gemma 2, softcap and window",
        "Gemma2",
        "ForCausalLM",
        dict(
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            tie_word_embeddings=False,  # tied, it repeats the last token for ever
        ),
    ),
    Model("qwen 3", "Qwen3", "ForCausalLM", dict(num_key_value_heads=2, head_dim=16)),
    Model(
        "gpt-oss, sinks",
        "GptOss",
        "ForCausalLM",
        dict(
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=5,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    Model("gpt 2", "GPT2", "LMHeadModel", dict(n_inner=96)),
    Model("bert", "Bert", "ForMaskedLM", generates=False),
    Model(
        "t5, position bias",
        "T5",
        "ForConditionalGeneration",
        dict(
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=1,
            tie_word_embeddings=False,
        ),
        is_encoder_decoder=True,
    ),
]
