#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vector_code.py ARCHIVE: whether the compiler vectorised the hot loops (MT_HOT) of the cpu device.

Each clone for AVX2 or AVX-512 has to use registers of 256 or 512 bits; one that does not is several times slower, and
gives the same bits, so that no other test notices.
"""
import re
import subprocess
import sys

CLONE = re.compile(r"^[0-9a-f]+ <(\w+)\.arch_x86_64_(v[34])>:$")
#: only call vectorised functions
CALLERS = {"backward_head"}


def clones(archive):
    """{(function, instruction set): whether it uses wide registers}"""
    found, wide = {}, None
    out = subprocess.run(["objdump", "-d", "--no-show-raw-insn", archive], capture_output=True, text=True, check=True)
    for line in out.stdout.splitlines():
        if line.endswith(">:"):
            m = CLONE.match(line)
            wide = m.groups() if m else None
            if wide:
                found.setdefault(wide, False)
        elif wide and re.search(r"%[yz]mm", line):
            found[wide] = True
    return found


def main():
    found = clones(sys.argv[1])
    scalar = sorted(f"{name} for {isa}" for (name, isa), wide in found.items() if not wide and name not in CALLERS)
    print(f"{len(found)} clones, {len(scalar)} of them not vectorised", *scalar, sep="\n  ")
    return 1 if scalar or len(found) < 40 else 0


if __name__ == "__main__":
    sys.exit(main())
