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
    sees: tuple[str, ...] = ("text",)  # "image", "sound"
    config: str = ""  # of the class, where it has another name

    def __str__(self) -> str:
        return self.name

    def build(self, attention: str, device: str, dtype: torch.dtype, **changes) -> PreTrainedModel:
        """The same weights whatever `attention` is."""
        options = self.options | changes
        if "image" not in self.sees:
            options = SIZES | options
        config = getattr(transformers, self.config or f"{self.kind}Config")(**options)
        torch.manual_seed(1)
        model = getattr(transformers, f"{self.kind}{self.head}")._from_config(
            config, attn_implementation=attention
        )
        return model.to(device, dtype).eval()

    def sides(self) -> list[str | None]:
        """Where padding may be."""
        return [None, "left", "right"] if "text" in self.sees else [None]

    def inputs(self, device: str, side: str | None) -> dict[str, torch.Tensor]:
        """Three sequences of 19 tokens, two of them shorter where `side` says where the padding
        is; three images; three sounds."""
        inputs = {}
        if "image" in self.sees:
            inputs["pixel_values"] = torch.randn(3, 3, 32, 32, device=device)
        if "sound" in self.sees:
            inputs["input_features"] = torch.randn(3, 8, 38, device=device)
        tokens = torch.randint(2, VOCABULARY, (3, 19), device=device)
        if "image" in self.sees:
            tokens[:, 9] = VOCABULARY - 1  # the end, whose state counts
        if "text" in self.sees:
            mask = torch.ones_like(tokens)
            if side is not None:
                for row, padding in ((0, 7), (2, 3)):
                    (mask[row, :padding] if side == "left" else mask[row, -padding:]).zero_()
            inputs |= dict(input_ids=tokens, attention_mask=mask)
        if self.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens[:, :11].flip(1)
        return inputs

    def logits(self, built: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the tokens that are no padding; of images and texts, how alike they are."""
        inputs = {n: x.to(built.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        out = built(**inputs)
        if "image" in self.sees and "text" in self.sees:
            return out.logits_per_image
        if self.sees == ("text",) and not self.is_encoder_decoder:
            return out.logits[inputs["attention_mask"].bool()]
        return out.logits


GQA = dict(num_key_value_heads=2)
# Every expert takes part: which ones are best may depend on a rounding.
ALL_EXPERTS = dict(num_experts_per_tok=2)
TOWER = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
TOWER |= dict(intermediate_size=96, initializer_range=0.3)

MODELS = [
    Model("llama, GQA", "Llama", "ForCausalLM", GQA),
    Model(
        "mistral, window",
        "Mistral",
        "ForCausalLM",
        GQA | dict(sliding_window=5),
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
    Model(
        "gemma 3, window",
        "Gemma3",
        "ForCausalLM",
        GQA
        | dict(
            head_dim=16,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=False,
        ),
        config="Gemma3TextConfig",
    ),
    Model("qwen 2", "Qwen2", "ForCausalLM", GQA),
    Model("mixtral", "Mixtral", "ForCausalLM", GQA | ALL_EXPERTS | dict(num_local_experts=2)),
    Model(
        "deepseek 3, wider keys than values",
        "DeepseekV3",
        "ForCausalLM",
        ALL_EXPERTS
        | dict(
            num_key_value_heads=4,
            n_routed_experts=2,
            n_group=1,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    ),
    Model("gpt 2", "GPT2", "LMHeadModel", dict(n_inner=96)),
    Model("bert", "Bert", "ForMaskedLM", generates=False),
    Model(
        "modern bert, window to both sides",
        "ModernBert",
        "ForMaskedLM",
        dict(local_attention=8, global_attn_every_n_layers=2),
        generates=False,
    ),
    Model(
        "whisper",
        "Whisper",
        "ForConditionalGeneration",
        dict(
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            num_mel_bins=8,
            max_source_positions=19,
            max_target_positions=32,
            init_std=0.3,
            decoder_start_token_id=1,
        ),
        generates=False,
        is_encoder_decoder=True,
        sees=("sound",),
    ),
    Model(
        "vit",
        "ViT",
        "ForImageClassification",
        TOWER | dict(image_size=32, patch_size=8, num_labels=7),
        generates=False,
        sees=("image",),
    ),
    Model(
        "clip",
        "CLIP",
        "Model",
        dict(
            text_config=TOWER
            | dict(vocab_size=VOCABULARY, max_position_embeddings=64, eos_token_id=VOCABULARY - 1),
            vision_config=TOWER | dict(image_size=32, patch_size=8),
            projection_dim=32,
        ),
        generates=False,
        sees=("image", "text"),
    ),
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
