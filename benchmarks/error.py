"""Error against float64, ours beside torch's FA2 on the same inputs: is ours at least as exact?

    python -m benchmarks.error [--backends sm80,fa2] [--device cuda] [--out FILE.json]

Largest and mean absolute error of the output and the three gradients, inputs N(0, 1) and N(0, 9),
dout N(0, 1). ratio: ours / peer; the target is at most 1.2.
"""

import argparse
import sys

import torch

from benchmarks import backends, results
from benchmarks.shapes import Case
from flash_attn.cli.peers import causal_hidden, naive_attention

TENSORS = ("out", "dq", "dk", "dv")


def exact(case: Case, inputs: backends.Inputs) -> list[torch.Tensor]:
    """out, dq, dk, dv in float64 on the inputs as stored."""
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    hidden = causal_hidden(case.seqlen, case.seqlen, q.device) if case.causal else None
    out = naive_attention(q, k, v, hidden)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout.double())]


def computed(name: str, case: Case, inputs: backends.Inputs) -> list[torch.Tensor]:
    out = backends.attention(name, case, inputs)(inputs.q, inputs.k, inputs.v)
    return [out.detach(), *torch.autograd.grad(out, inputs.leaves(), inputs.dout)]


def compare(
    case: Case, dtype: torch.dtype, std: float, names: list[str], device: torch.device
) -> list[dict]:
    inputs = backends.make_inputs(case, dtype, device, std)
    reference = exact(case, inputs)
    errors = {
        name: [
            (x.double() - y).abs()
            for x, y in zip(computed(name, case, inputs), reference, strict=True)
        ]
        for name in names
    }
    shape = {
        "dtype": str(dtype).split(".")[1],
        "std": std,
        "d": case.head_dim,
        "causal": case.causal,
        "seqlen": case.seqlen,
    }
    records = []
    for index, tensor in enumerate(TENSORS):
        for kind, reduce in (("error.max", torch.amax), ("error.mean", torch.mean)):
            values = {name: reduce(errors[name][index]).item() for name in names}
            ratio = results.ratios(values, names[0], names[1:], "more")
            records.append(results.record(kind, {"tensor": tensor, **shape}, "abs", values, ratio))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backends", help="ours first (default: sm80,fa2 on a GPU, aten,flash on a CPU)"
    )
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    names = (args.backends or ("sm80,fa2" if device.type == "cuda" else "aten,flash")).split(",")
    records = [
        results.run_record(device, "same inputs for all, float64 naive attention as the truth")
    ]
    for dtype in (torch.bfloat16, torch.float16):
        for std in (1.0, 3.0):
            for d in (64, 128, 256):
                for causal in (False, True):
                    records += compare(
                        Case(1, args.seqlen, 4, d, causal), dtype, std, names, device
                    )
    records += results.geometric_means(records, by=("tensor", "std"))
    results.write(args.out, records)
    print(results.show(records))
    measured = [r for r in records if r["kind"] in ("error.max", "error.mean") and r["ratio"]]
    for pair in dict.fromkeys(name for r in measured for name in r["ratio"]):
        worst = max(measured, key=lambda r: r["ratio"].get(pair, 0))
        print(f"largest {pair}: {worst['ratio'][pair]:.3f} ({worst['kind']} {worst['shape']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
