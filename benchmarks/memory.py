"""Does memory grow linearly with the sequence? Peak of both passes, ours beside naive attention.

    python -m benchmarks.memory [--device cuda] [--backends sm80,naive] [--out FILE.json]

``growth`` is the peak over the peak at half the length: 2 is linear, 4 is quadratic.
"""

import argparse
import sys

import torch

from benchmarks import backends, results
from benchmarks.shapes import Case
from flash_attn.cli.measure import peak_memory

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384, 32768), "cpu": (512, 1024, 2048, 4096)}
LARGEST_NAIVE = 2**31  # bytes of scores; naive attention keeps several copies of them


def peak_mib(name: str, case: Case, inputs: backends.Inputs) -> float | None:
    itemsize = inputs.q.element_size()
    if name == "naive" and case.batch * case.heads * case.seqlen**2 * itemsize > LARGEST_NAIVE:
        return None
    attend = backends.attention(name, case, inputs)

    def both() -> None:
        out = attend(inputs.q, inputs.k, inputs.v)
        torch.autograd.grad(out, inputs.leaves(), inputs.dout)

    both()
    peak = peak_memory(both, inputs.q.device)
    return None if peak is None else peak / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backends", help="ours first (default: sm80,naive on a GPU, aten,naive on a CPU)"
    )
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    names = (args.backends or ("sm80,naive" if cuda else "aten,naive")).split(",")
    dtype = torch.bfloat16 if cuda else torch.float32
    records = [results.run_record(device, "peak above the inputs, gradients included")]
    before: dict[str, float | None] = {}
    for seqlen in LENGTHS[device.type]:
        case = Case(1, seqlen, 8, 64, causal=True)
        inputs = backends.make_inputs(case, dtype, device)
        values = {name: peak_mib(name, case, inputs) for name in names}
        growth = {f"growth {n}": v / before[n] for n, v in values.items() if v and before.get(n)}
        records.append(results.record("memory", case.shape(), "MiB", values, growth or None))
        before = values
    results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
