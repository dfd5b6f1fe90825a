"""Fine-tunes a model of transformers on this library, then generates from a padded batch.

    pip install transformers
    python examples/finetune_transformers.py [--model NAME_OR_FOLDER] [--steps 60]

Without --model: a small Llama with random weights, which learns to count.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flash_attn.integrations.transformers import register

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMBERS, PAD = 48, 0


def make_model(name: str | None, attention: str) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation=attention)
    config = LlamaConfig(
        vocab_size=NUMBERS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def counting(rows: int, length: int) -> torch.Tensor:
    """Numbers that follow each other, from a random one on, in tokens 1 to NUMBERS."""
    start = torch.randint(NUMBERS, (rows, 1))
    return ((start + torch.arange(length)) % NUMBERS + 1).to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="of transformers' hub, or a folder")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = make_model(given.model, register()).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if given.model is None else 1e-5)
    for step in range(given.steps):
        tokens = counting(8, 24)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == given.steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)

    # Prompts of different lengths, padded on the left, as generate expects them.
    prompts = counting(3, 8)
    mask = torch.ones_like(prompts)
    for row, padding in enumerate((0, 5, 3)):
        prompts[row, :padding], mask[row, :padding] = PAD, 0
    generated = model.eval().generate(prompts, attention_mask=mask, max_new_tokens=8)
    for row in generated.tolist():
        print("prompt", [t for t in row[:8] if t != PAD], "goes on", row[8:])


if __name__ == "__main__":
    main()
