#!/usr/bin/env python3
"""Compiler launcher for nvcc: fails (or warns) on register spills and serialized wgmma.

ptxas only mentions both, as information, and exits 0 even with every -Werror; so its verbose
output is read here. Usage: check_ptxas.py --strict 0|1 -- nvcc ... -Xptxas=-v. The report stays
beside the object file, as <object>.ptxas.
"""

import re
import subprocess
import sys

SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALIZED = re.compile(r"wgmma.*serializ|C75(07|08|1\d)", re.IGNORECASE)
REPORT_LINE = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame|^$|is being ignored")


def findings(report: str) -> list[str]:
    """The kernels that spill and the lines that speak of serialized wgmma."""
    found, kernel = [], "?"
    for line in report.splitlines():
        if "Compiling entry function" in line or "Function properties for" in line:
            kernel = line.split("'")[1] if "'" in line else line.split()[-1]
        spill = SPILL.search(line)
        if spill and (int(spill[2]) or int(spill[3])):
            found.append(f"{kernel} spills registers: {line.strip()}")
        if SERIALIZED.search(line):
            found.append(line.strip())
    return found


def main() -> int:
    strict, command = sys.argv[2] == "1", sys.argv[4:]
    result = subprocess.run(command, capture_output=True, text=True)
    report = result.stdout + result.stderr
    sys.stderr.write(
        "".join(f"{line}\n" for line in report.splitlines() if not REPORT_LINE.search(line))
    )
    if "-o" in command:
        with open(command[command.index("-o") + 1] + ".ptxas", "w") as file:
            file.write(report)
    found = findings(report)
    for line in found:
        print(f"{'error' if strict else 'warning'}: flash_attn: {line}", file=sys.stderr)
    return result.returncode or (1 if found and strict else 0)


if __name__ == "__main__":
    sys.exit(main())
