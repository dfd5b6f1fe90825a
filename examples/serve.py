"""Serves requests from a paged cache: continuous batching, prefill in chunks, shared prefixes."""

import torch
from torch import nn

from flash_attn import find_shared_prefix, flash_attn_with_kvcache

VOCABULARY, HEADS, HEADS_KV, D, PAGE, PAGES, CHUNK, NEW = 97, 4, 2, 32, 16, 64, 24, 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACE = dict(device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)


class Model(nn.Module):
    """A random decoder of two layers, whose caches are pages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(128, (HEADS + 2 * HEADS_KV) * D) for _ in range(2))
        self.caches = torch.zeros(2, 2, PAGES, PAGE, HEADS_KV, D, **PLACE)
        angles = torch.arange(PAGES * PAGE)[:, None] * 1e4 ** -torch.linspace(0, 1, D // 2)
        self.rotary = dict(rotary_cos=angles.cos().to(**PLACE), rotary_sin=angles.sin().to(**PLACE))

    def append(self, tokens: list[list[int]], requests: list["Request"]) -> list[int]:
        """Writes each request's next tokens to its pages. Returns the likeliest ones after them."""
        table = [r.pages + [0] * (PAGES - len(r.pages)) for r in requests]
        index = dict(block_table=table, cache_seqlens=[r.cached for r in requests])
        index = {n: torch.tensor(x, device=DEVICE, dtype=torch.int32) for n, x in index.items()}
        index["shared_prefix"] = find_shared_prefix(**index, page_size=PAGE)
        x = self.embedding(torch.tensor(tokens, device=DEVICE))
        for project, caches in zip(self.qkv, self.caches, strict=True):
            q, k, v = project(x).unflatten(-1, (-1, D)).split([HEADS, HEADS_KV, HEADS_KV], 2)
            out = flash_attn_with_kvcache(q, *caches, k, v, **index, **self.rotary, causal=True)
            x = nn.functional.layer_norm(x / 4 + out.flatten(2), (128,))
        for request, new in zip(requests, tokens, strict=True):
            request.cached += len(new)
        return self.head(x[:, -1]).argmax(-1).tolist()


class Request:
    """Takes the pages that hold its prompt's beginning, and free ones for the rest."""

    def __init__(self, prompt: list[int], known: dict, free: list[int]) -> None:
        self.tokens, self.prompt = list(prompt), len(prompt)
        starts = [tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
        self.pages = [known[start] for start in starts if start in known]
        self.cached = PAGE * len(self.pages)
        self.pages += [free.pop() for _ in range(self.cached, len(prompt) + NEW, PAGE)]
        known.update(zip(starts, self.pages, strict=False))


@torch.inference_mode()
def serve(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    known, free, requests, prefilled = {}, list(range(PAGES)), [], 0
    while True:
        if all(r.cached >= r.prompt for r in requests) and len(requests) < len(prompts):
            requests.append(Request(prompts[len(requests)], known, free))
        new = requests[-1]
        if new.cached < new.prompt:
            chunk = new.tokens[new.cached :][:CHUNK]
            token, prefilled = model.append([chunk], [new]), prefilled + len(chunk)
            new.tokens += token if new.cached == new.prompt else []
        running = [r for r in requests if r.prompt < len(r.tokens) < r.prompt + NEW]
        if running:
            decoded = model.append([r.tokens[-1:] for r in running], running)
            for request, token in zip(running, decoded, strict=True):
                request.tokens.append(token)
        elif len(requests) == len(prompts) and new.cached >= new.prompt:
            print(f"{sum(map(len, prompts))} tokens of prompts, {prefilled} of them prefilled")
            return [r.tokens[r.prompt :] for r in requests]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model().to(**PLACE)
    system = torch.randint(VOCABULARY, (40,)).tolist()
    prompts = [system + torch.randint(VOCABULARY, (n,)).tolist() for n in (3, 30, 17, 1, 9)]
    for prompt, answer in zip(prompts, serve(model, prompts), strict=True):
        print(answer, "as alone" if serve(model, [prompt]) == [answer] else "not as alone")
