"""Error against float64, ours beside torch's FA2 on the same inputs: is ours at least as exact?

    python -m benchmarks.error [--backends sm80,fa2] [--dims 64,128,256] [--tensors N]
    [--device cuda] [--out FILE.json]

Largest and mean absolute error, and the norm of the error over the norm of the truth, of the output
and, where all contestants compute them, the three gradients; inputs N(0, 1) and N(0, 9), dout
N(0, 1). ratio: ours / peer; the target is at most 1.2 for an element and 1.1 for the norm. The
largest element of one tensor is a matter of luck (two exact kernels that round in another order
differ by 1.3): with --tensors N it is the largest of N tensors of each class.
"""

import argparse
import sys

import torch

from benchmarks import backends, results
from benchmarks.shapes import Case
from flash_attn.cli.peers import causal_hidden, naive_attention

TENSORS = ("out", "dq", "dk", "dv")


def exact(case: Case, inputs: backends.Inputs, gradients: bool) -> list[torch.Tensor]:
    """out and, with gradients, dq, dk, dv in float64 on the inputs as stored."""
    q, k, v = (
        x.detach().double().requires_grad_(gradients) for x in (inputs.q, inputs.k, inputs.v)
    )
    hidden = causal_hidden(case.seqlen, case.seqlen, q.device) if case.causal else None
    out = naive_attention(q, k, v, hidden)
    if not gradients:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout.double())]


def computed(name: str, case: Case, inputs: backends.Inputs, gradients: bool) -> list[torch.Tensor]:
    attend = backends.attention(name, case, inputs)
    if not gradients:
        with torch.no_grad():
            return [attend(inputs.q, inputs.k, inputs.v)]
    out = attend(inputs.q, inputs.k, inputs.v)
    return [out.detach(), *torch.autograd.grad(out, inputs.leaves(), inputs.dout)]


def compare(
    case: Case, dtype: torch.dtype, std: float, names: list[str], device: torch.device, tensors: int
) -> list[dict]:
    """Records of error.max, error.mean and error.norm over `tensors` draws of the inputs."""
    largest, mean, norm = ([dict.fromkeys(names, 0.0) for _ in TENSORS] for _ in range(3))
    for seed in range(tensors):
        inputs = backends.make_inputs(case, dtype, device, std, seed)
        gradients = all(backends.has_backward(name, inputs) for name in names)
        reference = exact(case, inputs, gradients)
        for name in names:
            outputs = computed(name, case, inputs, gradients)
            for index, (x, y) in enumerate(zip(outputs, reference, strict=True)):
                error = (x.double() - y).abs()
                largest[index][name] = max(largest[index][name], error.max().item())
                mean[index][name] += error.mean().item() / tensors
                norm[index][name] += (error.norm() / y.norm()).item() / tensors
    shape = {
        "dtype": str(dtype).split(".")[1],
        "std": std,
        "d": case.head_dim if case.dim_v == case.head_dim else f"{case.head_dim}x{case.dim_v}",
        "causal": case.causal,
        "seqlen": case.seqlen,
        "tensors": tensors,
    }
    records = []
    for index, tensor in enumerate(TENSORS[: len(reference)]):
        for kind, values in (
            ("error.max", largest[index]),
            ("error.mean", mean[index]),
            ("error.norm", norm[index]),
        ):
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
    parser.add_argument(
        "--dims", default="64,128,256", help="head dims, or DxDV (default 64,128,256)"
    )
    parser.add_argument("--tensors", type=int, default=1, help="draws of the inputs (default 1)")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    names = (args.backends or ("sm80,fa2" if device.type == "cuda" else "aten,flash")).split(",")
    records = [
        results.run_record(device, "same inputs for all, float64 naive attention as the truth")
    ]
    for dtype in (torch.bfloat16, torch.float16):
        for std in (1.0, 3.0):
            for dims in args.dims.split(","):
                d, _, dv = dims.partition("x")
                for causal in (False, True):
                    case = Case(
                        1, args.seqlen, 4, int(d), causal, head_dim_v=int(dv) if dv else None
                    )
                    records += compare(case, dtype, std, names, device, args.tensors)
    records += results.geometric_means(records, by=("tensor", "std"))
    results.write(args.out, records)
    print(results.show(records))
    for kind in ("error.max", "error.mean", "error.norm"):
        measured = [r for r in records if r["kind"] == kind and r["ratio"]]
        for pair in dict.fromkeys(name for r in measured for name in r["ratio"]):
            worst = max(measured, key=lambda r: r["ratio"].get(pair, 0))
            print(f"largest {pair}: {worst['ratio'][pair]:.3f} ({kind} {worst['shape']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
