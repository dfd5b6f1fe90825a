"""One small case a kernel instantiation: what compute-sanitizer runs (pytest -m sanitize), every
path a warp can take.

The reference is computed on the CPU, so that a sanitizer sees little but our kernels.
"""

from __future__ import annotations

import pytest
from caches import CacheCase, CacheProblem, each_cache, skip_unless_served
from cases import DECODE_CUDA, PREFILL_TARGETS, SM80, SM90, Case, Target, check, each_case
from test_decode import DecodeCase, each_decode
from test_decode import check as check_decode

HEAD_DIM_CLASSES = (64, 96, 128, 192, 256)
# Ragged to both sides of a tile, an empty sequence, an empty row, GQA, masks on both sides.
SHAPES = {
    "causal": dict(batch=1, seqlen_q=70, seqlen_k=130, causal=True),
    "full": dict(batch=2, seqlen_q=33, seqlen_k=65),
    "window": dict(batch=1, seqlen_q=140, seqlen_k=70, window=(20, 5)),
    "varlen": dict(
        lengths_q=(65, 0, 9), lengths_k=(33, 7, 130), tail=3, causal=True, lse_grad=True
    ),
    "used": dict(
        lengths_q=(40, 9),
        lengths_k=(70, 65),
        seqused_q=(33, 9),
        seqused_k=(64, 3),
        leftpad_k=(5, 0),
    ),
}


def kernel_cases() -> list[Case]:
    cases = []
    for d in HEAD_DIM_CLASSES:
        for i, shape in enumerate(SHAPES.values()):
            for j, deterministic in enumerate((False, True)):
                dtype = ("fp16", "bf16")[(i + j) % 2]
                cases.append(
                    Case(
                        d=d,
                        dtype=dtype,
                        deterministic=deterministic,
                        heads_q=4,
                        heads_kv=2,
                        **shape,
                    )
                )
    # The class of the largest head dims, plain and with score terms: two iterations and more.
    for i, shape in enumerate(SHAPES.values()):
        for j, more in enumerate((dict(d=512), dict(d=264, d_v=512, dropout_p=0.2, softcap=5.0))):
            for deterministic in (False, True):
                dtype = ("fp16", "bf16")[(i + j + deterministic) % 2]
                more |= dict(dtype=dtype, deterministic=deterministic, heads_q=4, heads_kv=2)
                cases.append(Case(**more | shape))
    # sm90's further classes, and its tiles for many queries.
    for d in (48, 80, 160):
        for i, shape in enumerate(SHAPES.values()):
            dtype = ("fp16", "bf16")[i // 2 % 2]
            cases.append(Case(d=d - 8 * (i % 2), dtype=dtype, heads_q=4, heads_kv=2, **shape))
    for d in (40, 64, 72, 96, 128):
        cases.append(Case(d=d, dtype="bf16", batch=1, seqlen_q=1100, seqlen_k=200, heads_q=2))
    cases.append(Case(d=40, d_v=24, dtype="fp16", seqlen_q=33, seqlen_k=20, causal=True))
    cases.append(Case(d=80, d_v=24, dtype="bf16", seqlen_q=33, seqlen_k=20, causal=True))
    cases.append(Case(d=56, d_v=72, dtype="fp16", seqlen_q=33, seqlen_k=20))
    cases.append(Case(d=192, d_v=128, dtype="bf16", seqlen_q=33, seqlen_k=20, causal=True))
    cases.append(Case(d=13, dtype="bf16", seqlen_q=33, seqlen_k=20))
    # A kernel of its own for dq: one of its two consumers without queries, the other with few.
    one = dict(batch=1, heads_q=2, heads_kv=1, seqlen_q=130, seqlen_k=140)
    cases.append(Case(d=256, dtype="fp16", causal=True, **one))
    cases.append(Case(d=256, dtype="bf16", **one))
    # Score terms, which are instances of their own.
    terms = (
        dict(softcap=5.0),
        dict(alibi="batch", causal=True),
        dict(sink=True, softcap=20.0),
        dict(dropout_p=0.2, alibi="head"),
    )
    for i, d in enumerate((56, 128, 160)):
        for j, shape in enumerate(SHAPES.values()):
            for deterministic in (False, True):
                term, dtype = terms[(i + j) % 4], ("fp16", "bf16")[(i + j + deterministic) % 2]
                more = dict(deterministic=deterministic, heads_q=4, heads_kv=2)
                cases.append(Case(d=d, dtype=dtype, **more | shape | term))
    # Alone, a term has a kernel of its own on Hopper: over several blocks of keys.
    for d in (56, 128):
        for term in (dict(dropout_p=0.2), dict(alibi="head"), dict(softcap=30.0)):
            several = dict(batch=1, seqlen_q=150, seqlen_k=400, heads_q=4, heads_kv=2)
            cases.append(Case(d=d, dtype="bf16", **several | term))
        # As many sequences share this bias as no ring has places.
        cases.append(Case(d=d, dtype="fp16", batch=6, bias="head", seqlen_q=72, seqlen_k=136))
    # More tiles than a chip has multiprocessors: Hopper's thread blocks take one after the other.
    # And more heads than a pool has places for their sums of dq.
    for d in (64, 128, 192, 256):
        forms = (dict(batch=4), dict(batch=4, causal=True), dict(batch=2, deterministic=True))
        for i, more in enumerate(forms):
            many = dict(heads_q=80, heads_kv=80, seqlen_q=120, seqlen_k=150)
            cases.append(Case(d=d, dtype=("fp16", "bf16")[i % 2], **many | more))
    # A pool of other classes, and one of long heads, if the device has few multiprocessors.
    for d, dtype, causal in ((40, "bf16", True), (72, "fp16", False), (96, "bf16", True)):
        some = dict(batch=1, heads_q=24, heads_kv=24, seqlen_q=120, seqlen_k=150)
        cases.append(Case(d=d, dtype=dtype, causal=causal, **some))
    for d in (48, 64):
        several = dict(batch=1, heads_q=12, heads_kv=12, seqlen_q=530, seqlen_k=530)
        cases.append(Case(d=d, dtype="bf16", **several))
    # The same with varlen sequences, some of which nobody adds to.
    for d in (64, 80, 128):
        some = (128, 120, 128, 60) * 8
        for i, lengths_k in enumerate(((300, 0, 500, 240) * 8, some)):
            many = dict(lengths_q=some, lengths_k=lengths_k, heads_q=24, heads_kv=24, tail=9)
            cases.append(Case(d=d, dtype=("fp16", "bf16")[i], causal=i == 1, **many))
    # With a short window a pool takes the sums of a longer head stretch by stretch.
    few = dict(batch=1, heads_q=2, heads_kv=2)
    cases.append(Case(d=64, dtype="bf16", seqlen_q=4200, window=(100, 0), **few))
    cases.append(Case(d=80, dtype="bf16", seqlen_q=4150, window=(60, 0), **few))
    cases.append(Case(d=128, dtype="fp16", seqlen_q=4150, window=(40, 30), **few))
    more = dict(batch=1, heads_q=2, heads_kv=2, seqlen_q=4100)
    cases.append(Case(d=64, dtype="fp16", seqlen_k=900, window=(50, 90), **more))
    cases.append(Case(d=64, dtype="bf16", seqlen_k=4300, window=(60, 0), top_left=True, **more))
    # Sums of a pool that nobody adds to, in the place of others.
    one = dict(batch=3, heads_q=1, heads_kv=1, seqlen_q=4100, window=(60, 0))
    cases.append(Case(d=64, dtype="bf16", seqused_k=(4100, 0, 0), **one))
    for d in (64, 128):
        many = dict(batch=36, heads_q=10, heads_kv=10, seqlen_q=120, seqlen_k=150)
        used = (150, 0, 150, 0, 0, 150) * 6
        cases.append(Case(d=d, dtype="fp16", seqused_k=used, **many))
    # Each way in which a bias reaches a tile.
    for d in (64, 128):
        for bias in ("full", "head", "key", "row", "padding"):
            cases.append(Case(d=d, dtype="bf16", bias=bias, seqlen_q=72, seqlen_k=136))
    for d in (64, 128, 256):
        for shape in ("causal", "varlen"):
            cases.append(Case(d=d, dtype="fp32", **SHAPES[shape]))
    for d in (64, 128, 256):
        for bias in ("full", "head", "key", "row"):
            cases.append(Case(d=d, dtype="fp32", bias=bias, seqlen_q=72, seqlen_k=136))
        more = dict(dropout_p=0.2, softcap=20.0, seqlen_q=72, seqlen_k=136)
        cases.append(Case(d=d, dtype="fp32", causal=True, deterministic=True, **more))
        cases.append(Case(d=d, dtype="fp32", alibi="head", **more))
    # Long enough for the other tile of d = 64 on Hopper.
    for dtype in ("fp16", "bf16"):
        cases.append(
            Case(d=64, dtype=dtype, batch=1, heads_q=1, heads_kv=1, seqlen_q=1030, seqlen_k=200)
        )
    return cases


@each_case(kernel_cases(), [SM80, SM90], marks=[pytest.mark.sanitize])
def test_kernels(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


def decode_kernel_cases() -> list[DecodeCase]:
    return [
        DecodeCase(
            d=d,
            dtype=dtype,
            num_splits=splits,
            heads_q=heads_q,
            lengths=(0, 65, 130),
            capacity=130,
            **more,
        )
        for dtype in ("fp16", "bf16", "fp32")
        for d in (HEAD_DIM_CLASSES if dtype != "fp32" else (64, 128, 256))
        for splits, heads_q, more in (
            (1, 2, {}),
            (3, 16, {"window": (40, 0)}),
            (5, 6, {"seqlen_q": 3}),
            (2, 8, {"page_size": 3}),
        )
    ]


def cache_kernel_cases() -> list[CacheCase]:
    """Caches of 8 bits and of fp32, pages, the append, terms; shared pages; plain ones cut by
    length."""
    of_bf16 = (
        ("fp8", 0, "halves"),
        ("int8", 16, ""),
        ("fp8", 3, "interleaved"),
        ("", 16, "halves"),
    )
    cases = [
        CacheCase(
            d=d,
            dtype=dtype,
            cache=cache,
            page_size=page_size,
            capacity=130,
            new=3,
            seqlen_q=3,
            rotary=rotary,
            sink=page_size > 0,
            tree="each" if page_size == 0 else "",
            bias="fp32" if page_size == 3 else "",
            softcap=8.0 * (page_size == 16),
            alibi=page_size == 3,
            rows=page_size == 16,
            leftpad=page_size == 0,
        )
        for dtype, classes, forms in (
            ("bf16", (64, 128, 192, 256, 512), of_bf16),
            ("fp32", (64, 128, 256), (("", 0, "halves"), ("", 16, ""), ("", 3, "interleaved"))),
        )
        for d in classes
        for cache, page_size, rotary in forms
    ]
    # The second instances of decode.cuh.
    cases += [
        CacheCase(d=d, dtype=dtype, capacity=130, leftpad=True, **form)
        for d in (64, 128, 192, 256)
        for dtype in ("fp16", "bf16")
        for form in (
            dict(softcap=8.0, num_splits=3),
            dict(alibi=True, page_size=7, batch_invariant=True),
            dict(d_v=40, softcap=8.0, page_size=16),
            dict(bias="same", page_size=16, num_splits=3),
            dict(tree="each", seqlen_q=5),
            dict(new=2, rotary="interleaved", batch_invariant=True),
        )
    ]
    # Keys and values of unlike widths: the wider one has the class.
    cases += [
        CacheCase(d=d, d_v=d_v, capacity=130, num_splits=3, **form)
        for d, d_v in ((192, 128), (64, 200), (128, 40))
        for form in (dict(leftpad=True), dict(page_size=16, new=2, batch_invariant=True))
    ]
    # Multi-head latent attention, whose keys are wider than all others.
    latent = dict(d=576, heads_kv=1, capacity=130)
    cases += [
        CacheCase(dtype=dtype, **latent, **form)
        for dtype in ("fp16", "bf16")
        for form in (
            dict(d_v=512, heads_q=20, leftpad=True, sink=True),
            dict(d_v=512, heads_q=16, page_size=16, new=2, seqlen_q=3, rotary="halves"),
            dict(heads_q=5, page_size=7, softcap=8.0, alibi=True, bias="same", num_splits=3),
        )
    ]
    # Where an SM takes two blocks: long calls, by what the table could hold.
    cases += [
        CacheCase(d=d, cache=cache, page_size=3, beyond=100_000)
        for d in (64, 128)
        for cache in ("fp8", "int8")
    ]
    # In one piece, and long enough for the ring of tiles to go round: two times and more.
    long = dict(d=128, batch=1, capacity=2100, lengths="none", num_splits=1)
    cases += [CacheCase(cache="int8", page_size=16, **long), CacheCase(dtype="fp32", **long)]
    # Shared pages: few rows for a thread block, and many.
    cases += [
        CacheCase(d=d, dtype=dtype, page_size=16, capacity=130, shared=True, **rows)
        for d in (64, 128, 192)
        for dtype in ("fp16", "bf16")
        for rows in (dict(seqlen_q=3, new=1), dict(batch=20, heads_q=8, heads_kv=1))
    ]
    # By length, of one kind for all batches.
    return cases + [
        CacheCase(
            d=d,
            dtype=dtype,
            batch=2,
            capacity=2100,
            page_size=page_size,
            lengths="none",
            batch_invariant=True,
        )
        for d in HEAD_DIM_CLASSES
        for dtype in ("fp16", "bf16")
        for page_size in (0, 16)
    ]


def chunk_cases() -> list[CacheCase]:
    """Many new tokens: rows of a dense cache, pages in place and copied, of which some are
    missing; few tiles with long keys, which sm90 cuts into pieces."""
    cases = [
        CacheCase(d=d, dtype=dtype, seqlen_q=70, new=33, capacity=140, rotary="halves", **form)
        for d, dtype in ((64, "bf16"), (128, "fp16"))
        for form in (
            dict(rows=True, leftpad=True),
            dict(page_size=16, rows=True, leftpad=True),
            dict(page_size=7, window=(30, 0), garbage=True, num_splits=1),
            dict(causal=False),
        )
    ]
    cases += [
        CacheCase(d=d, dtype=dtype, batch=1, heads_q=2, heads_kv=1, seqlen_q=70, **form)
        for d, dtype in ((40, "fp16"), (64, "bf16"), (128, "fp16"), (256, "bf16"))
        for form in (
            dict(capacity=1100, new=33, rotary="halves", leftpad=True),
            dict(capacity=1100, num_splits=1),
            dict(capacity=1104, page_size=16, causal=False),
            dict(capacity=1106, page_size=7, window=(900, 0), garbage=True),
        )
    ]
    # Heads that share tiles of sm90: some rows of one, three tiles for a kv head, one row a head.
    cases += [
        CacheCase(d=d, dtype=dtype, capacity=1100, **form)
        for d, dtype in ((64, "bf16"), (128, "fp16"), (256, "bf16"))
        for form in (
            dict(heads_q=14, seqlen_q=5, new=5, rotary="halves", window=(700, 0)),
            dict(heads_q=6, heads_kv=1, seqlen_q=33, page_size=16, rows=True, garbage=True),
            dict(heads_q=40, heads_kv=1, num_splits=1),
        )
    ]
    return cases + [
        CacheCase(d=256, seqlen_q=130, capacity=140, causal=False, dtype="fp16"),
        CacheCase(
            d=256, seqlen_q=70, new=33, capacity=140, page_size=7, garbage=True, rotary="halves"
        ),
        CacheCase(d=192, d_v=128, seqlen_q=70, capacity=140, page_size=16, garbage=True),
        CacheCase(
            d=128, seqlen_q=70, new=33, capacity=140, page_size=7, dtype="fp32", garbage=True
        ),
        CacheCase(d=512, seqlen_q=70, new=33, capacity=140, page_size=16, rotary="halves"),
    ]


def latent_cases() -> list[CacheCase]:
    """More rows than a tile of decode.cuh's has. Among them are tiles with few rows and with none
    beyond, rings that go round, pages that TMA reads in boxes and one that it cannot, and narrower
    heads."""
    deepseek = dict(d=576, d_v=512, heads_kv=1)
    return [
        CacheCase(latent=True, dtype=dtype, **form)
        for dtype in ("fp16", "bf16")
        for form in (
            dict(**deepseek, heads_q=128, capacity=300, leftpad=True, sink=True),
            dict(**deepseek, heads_q=20, seqlen_q=4, capacity=140, window=(40, 0)),
            dict(**deepseek, heads_q=40, capacity=200, page_size=16, rows=True, num_splits=3),
            dict(**deepseek, heads_q=33, capacity=140, page_size=7, garbage=True),
            dict(**deepseek, heads_q=33, capacity=140, page_size=8, garbage=True),
            dict(**deepseek, heads_q=70, capacity=700, page_size=48, leftpad=True),
            dict(**deepseek, heads_q=128, capacity=700, page_size=128),
            dict(**deepseek, heads_q=17, capacity=2100, batch_invariant=True),
            dict(**deepseek, heads_q=64, batch=1, capacity=700, lengths="none", num_splits=1),
            dict(d=544, d_v=504, heads_q=66, heads_kv=2, seqlen_q=2, capacity=130, causal=False),
            dict(d=264, d_v=200, heads_q=70, heads_kv=1, capacity=130, page_size=16),
        )
    ]


@each_decode(decode_kernel_cases(), [DECODE_CUDA], marks=[pytest.mark.sanitize])
def test_decode(case: DecodeCase, target: Target, seed: int) -> None:
    check_decode(case, target, seed)


def check_cache(case: CacheCase, target: Target, seed: int) -> None:
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target)
    problem.compare(*problem.run(target.backend))


@each_cache(cache_kernel_cases(), [DECODE_CUDA], marks=[pytest.mark.sanitize])
def test_caches(case: CacheCase, target: Target, seed: int) -> None:
    check_cache(case, target, seed)


@each_cache(latent_cases(), [DECODE_CUDA, SM90], marks=[pytest.mark.sanitize])
def test_latent_attention(case: CacheCase, target: Target, seed: int) -> None:
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target, return_max_logits=True)
    problem.compare(*problem.run(target.backend, return_max_logits=True))


@each_cache(chunk_cases(), PREFILL_TARGETS, marks=[pytest.mark.sanitize])
def test_chunks(case: CacheCase, target: Target, seed: int) -> None:
    check_cache(case, target, seed)
