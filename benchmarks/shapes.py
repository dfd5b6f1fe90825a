"""The shapes of the races; those of caches are in cache_shapes.py."""

import math
import random
from dataclasses import dataclass, replace

TOKENS, HIDDEN = (
    16384,
    2048,
)  # of every dense GPU shape: batch = TOKENS / seqlen, heads = HIDDEN / head_dim


@dataclass(frozen=True)
class Case:
    """One attention call; 0, None, False and () leave a feature out."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool = False
    heads_kv: int | None = None  # None: heads
    head_dim_v: int | None = None  # None: head_dim
    window: int | None = None  # keys to the left of the diagonal
    softcap: float = 0.0
    alibi: bool = False
    bias: str | None = None  # "fixed" or "grad": additive (1, heads, seqlen, seqlen)
    sink: bool = False
    dropout: float = 0.0
    deterministic: bool = False
    docs: tuple[int, ...] = ()  # varlen: the lengths; seqlen is the longest, batch 1
    peak: float = 0.0  # the standard deviation of softmax_scale · q · k; 0.0: that is 1

    @property
    def kv_heads(self) -> int:
        return self.heads_kv or self.heads

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def tokens(self) -> int:
        return sum(self.docs) or self.batch * self.seqlen

    def pairs(self) -> float:
        """(query, key) pairs that the mask leaves one head; causal counts half of the square."""
        lengths = self.docs or (self.seqlen,) * self.batch
        if self.window is not None:
            width = self.window + 1
            return sum(min(width, s) * s - min(width, s) * (min(width, s) - 1) / 2 for s in lengths)
        return sum(s * s for s in lengths) * (0.5 if self.causal else 1.0)

    def flops(self, backward: bool) -> float:
        """Forward: QKᵀ and PV. Backward: QKᵀ again, dP, dQ, dK, dV."""
        columns = 3 * self.head_dim + 2 * self.dim_v if backward else self.head_dim + self.dim_v
        return 2.0 * self.pairs() * self.heads * columns

    def shape(self) -> dict:
        """What a record says of the case: the dense sizes, then only what is set."""
        result = {
            "d": self.head_dim,
            "causal": self.causal,
            "seqlen": self.seqlen,
            "batch": self.batch,
            "heads": self.heads,
        }
        extras = (
            "heads_kv",
            "head_dim_v",
            "window",
            "softcap",
            "alibi",
            "bias",
            "sink",
            "dropout",
            "deterministic",
            "peak",
        )
        result |= {name: getattr(self, name) for name in extras if getattr(self, name)}
        if self.docs:
            result |= {"docs": len(self.docs), "tokens": self.tokens}
        return result


def dense(quick: bool = False) -> list[Case]:
    """The 36 shapes, forward and backward."""
    lengths = (512, 4096) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    return [
        Case(TOKENS // s, s, HIDDEN // d, d, causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in lengths
    ]


def peaked(quick: bool = False) -> list[Case]:
    """Scores of which few keys of a row outweigh the others, as in trained models."""
    cases = [
        Case(TOKENS // s, s, HIDDEN // d, d, causal, peak=peak)
        for d in (64, 96, 128, 256)
        for s, causal in ((512, False), (2048, False), (8192, True), (8192, False))
        for peak in (3.0, 6.0)
    ]
    return cases[::8] if quick else cases


def documents() -> tuple[int, ...]:
    """64 lengths, log-uniform from 100 to 16384."""
    generator = random.Random(0)
    return tuple(
        round(math.exp(generator.uniform(math.log(100), math.log(16384)))) for _ in range(64)
    )


def other_shapes(quick: bool = False) -> list[Case]:
    """GQA, other head dims, a window, varlen: what a forward without score terms meets besides."""
    gqa = [Case(TOKENS // s, s, 32, 128, True, heads_kv=8) for s in (2048, 8192)]
    dims = [
        Case(2, 8192, 16, d, causal, head_dim_v=dv)
        for d, dv in ((96, None), (192, None), (192, 128), (80, None), (72, None), (40, None))
        for causal in (False, True)
    ]
    docs = documents()
    others = [
        Case(1, 16384, 16, 128, True, window=1024),
        Case(1, max(docs), 16, 128, True, docs=docs),
    ]
    cases = gqa + dims + others
    return cases[::4] if quick else cases


def narrow_heads(quick: bool = False) -> list[Case]:
    """Head dims that have fewer columns than the class of kernels they run in."""
    cases = [
        Case(TOKENS // s, s, HIDDEN // d, d, causal)
        for d in (16, 32, 40, 56, 72, 112, 160, 224)
        for s, causal in ((1024, True), (4096, False), (4096, True))
    ]
    return cases[::8] if quick else cases


def few_tiles(quick: bool = False) -> list[Case]:
    """One sequence and few kv heads: fewer blocks of keys than a GPU has multiprocessors."""
    cases = [
        Case(1, s, 32, d, True, heads_kv=heads_kv)
        for s, heads_kv, d in (
            (4096, 2, 128),
            (4096, 1, 128),
            (2048, 4, 128),
            (2048, 8, 128),
            (1024, 8, 128),
            (8192, 2, 128),
            (4096, 2, 64),
        )
    ]
    return cases[::4] if quick else cases


def short_sequences(quick: bool = False) -> list[Case]:
    """No shared keys: varlen sequences of up to 1k tokens, of one length and of many; dense ones as
    short, a few in all or as many as patches of images are."""
    generator = random.Random(0)
    ragged = tuple(generator.randint(64, 448) for _ in range(64))
    varlen = [
        Case(1, max(docs), HIDDEN // d, d, causal, docs=docs)
        for docs in ((128,) * 128, (256,) * 64, (1024,) * 16, ragged)
        for d in (64, 80, 128)
        for causal in (False, True)
    ]
    few = [
        Case(batch, s, HIDDEN // d, d, causal)
        for batch, s, d, causal in (
            (8, 256, 64, True),
            (4, 512, 64, True),
            (4, 1024, 128, True),
            (8, 2048, 64, False),
            (16, 1024, 128, True),
        )
    ]
    many = [
        Case(batch, s, HIDDEN // d, d, causal)
        for batch, s, d, causal in (
            (64, 256, 72, False),
            (28, 577, 80, False),
            (22, 729, 72, False),
            (8, 2048, 80, True),
            (16, 1024, 40, True),
            (32, 512, 96, False),
            (16, 1024, 96, True),
            (32, 512, 64, False),
            (16, 1024, 64, False),
            (8, 2048, 64, True),
            (4, 4096, 64, True),
        )
    ]
    cases = varlen + few + many
    return cases[::8] if quick else cases


def deterministic(quick: bool = False) -> list[Case]:
    """Five head-dim classes at 2k and 8k, full and causal; GQA; documents."""
    cases = [
        Case(TOKENS // s, s, HIDDEN // d, d, causal, deterministic=True)
        for d in (64, 96, 128, 192, 256)
        for causal in (False, True)
        for s in (2048, 8192)
    ]
    docs = documents()
    cases.append(Case(2, 8192, 32, 128, True, heads_kv=8, deterministic=True))
    cases.append(Case(1, max(docs), 16, 128, True, docs=docs, deterministic=True))
    return cases[::4] if quick else cases


def features(quick: bool = False) -> list[Case]:
    """The other shapes, then score terms, dropout, determinism, few heads of keys."""
    terms = []
    for d in (128, 64):
        heads = HIDDEN // d
        causal_8k = dict(batch=2, seqlen=8192, heads=heads, head_dim=d, causal=True)
        terms += [
            Case(**causal_8k, softcap=50.0),
            Case(**causal_8k, alibi=True),
            Case(4, 4096, heads, d, bias="fixed"),
            Case(4, 4096, heads, d, bias="grad"),
            Case(**causal_8k, sink=True),
            Case(**causal_8k, dropout=0.1),
        ]
    deterministic = [
        Case(2, 8192, HIDDEN // d, d, True, deterministic=True) for d in (64, 128, 256)
    ]
    few = [Case(1, 4096, 32, d, True, heads_kv=2) for d in (64, 128)]
    cases = terms + deterministic + few
    return other_shapes(quick) + (cases[::4] if quick else cases)


def score_terms(quick: bool = False) -> list[Case]:
    """Plain calls, and each with one score term, dropout or a sink."""
    cases = []
    for d in (128, 64):
        causal = Case(2, 8192, HIDDEN // d, d, True)
        full = Case(4, 4096, HIDDEN // d, d)
        changes = (
            *(dict(softcap=50.0), dict(alibi=True), dict(sink=True), dict(dropout=0.1)),
            *(dict(bias="fixed"), dict(bias="grad")),
        )
        cases.append(causal)
        cases += [replace(causal, **change) for change in changes[:4]]
        cases.append(full)
        cases += [replace(full, **change) for change in changes[4:]]
    return cases[:6:5] if quick else cases


def float32(quick: bool = False) -> list[Case]:
    """For torch's switch of TF32, off and on."""
    cases = [
        Case(TOKENS // s, s, HIDDEN // d, d, causal)
        for s in (1024, 8192, 4096)
        for d in (64, 128, 256)
        for causal in (False, True)
    ]
    return cases[::6] if quick else cases


def wide(quick: bool = False) -> list[Case]:
    """Head dims above 256."""
    cases = [
        Case(TOKENS // s, s, HIDDEN // d, d, causal)
        for causal in (True, False)
        for d in (512, 320, 384)
        for s in (1024, 4096, 8192)
    ]
    return cases[::6] if quick else cases


def packed(quick: bool = False) -> list[Case]:
    """Forms of calls whose q, k and v lie in one tensor; few heads of keys; documents."""
    cases = [
        Case(TOKENS // s, s, HIDDEN // d, d, True) for d in (64, 128) for s in (512, 2048, 8192)
    ]
    docs = documents()
    cases.append(Case(2, 8192, 32, 128, True, heads_kv=8))
    cases.append(Case(1, max(docs), 16, 128, True, docs=docs))
    return cases[::3] if quick else cases


def gpt2_medium(quick: bool = False) -> list[Case]:
    """FlashAttention-1's headline shape."""
    return [Case(b, 1024, 16, 64, True) for b in ((8,) if quick else (8, 16, 32, 64))]


def cpu(quick: bool = False) -> list[Case]:
    """Long sequences, and with BERT's and GPT-2's heads a few words, sentences, paragraphs."""
    s = 1024 if quick else 4096
    long = [(1, s, 8, 64), (1, s, 4, 128)]
    short = [(1, 16, 12, 64), (1, 64, 12, 64), (8, 128, 12, 64), (2, 512, 12, 64)]
    cases = long[:1] if quick else long + short
    return [Case(*sizes, causal) for sizes in cases for causal in (False, True)]
