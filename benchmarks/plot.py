"""Draws a race over sequence length: a panel for each head dim and mask, a line a contestant.

python -m benchmarks.plot RACE.json OUT.png [--kinds fwd,bwd]
"""

import argparse
import sys

from benchmarks import results
from flash_attn.cli.plot import plot_records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("race", metavar="RACE.json")
    parser.add_argument("out", metavar="OUT.png")
    parser.add_argument("--kinds", default="fwd,bwd")
    args = parser.parse_args()
    records = results.read(args.race)
    run = next((r["values"] for r in records if r["kind"] == "run"), {})
    chosen = [r for r in records if r["kind"] in args.kinds.split(",")]
    if not chosen:
        parser.error(f"{args.race}: no record of kind {args.kinds}")
    title = "  ".join(str(run[k]) for k in ("chip", "date", "commit") if run.get(k))
    plot_records(chosen, args.out, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
