#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kernel_resources.py LOG...: what ptxas said about each kernel (cuda/compile keeps it). Prints registers,
shared memory and the warps of a multiprocessor that fit by registers; fails where a kernel spills or has
a stack, or where a log names no kernel."""
import re
import subprocess
import sys

# Warps a multiprocessor holds; all have 64k registers, given in units of 256 a warp.
WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}


def kernels(text):
    """(architecture, mangled name, {registers, stack, spills, shared}) of each compiled kernel."""
    for part in text.split("Compiling entry function ")[1:]:
        name, arch = re.match(r"'(\w+)' for 'sm_(\d+)", part).groups()
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        yield int(arch), name, {
            "registers": int(re.search(r"Used (\d+) registers", part).group(1)),
            "stack": int(spills.group(1)), "spills": int(spills.group(2)) + int(spills.group(3)),
            "shared": int(shared.group(1)) if shared else 0}


def plain_names(names):
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout
    return dict(zip(names, (re.sub(r"^void |\(.*", "", n) for n in out.splitlines()))) if out else {}


def main():
    found, bad = [], 0
    for path in sys.argv[1:]:
        with open(path) as f:
            here = list(kernels(f.read()))
        if not here:
            print(f"{path}: no kernel")
            bad += 1
        found += here
    names = plain_names(sorted({name for _, name, _ in found}))
    print(f"{'kernel':56} {'sm':>4} {'regs':>5} {'shared':>7} {'warps':>6}")
    for arch, name, k in sorted(found, key=lambda x: (names.get(x[1], x[1]), x[0])):
        most = WARPS.get(arch, 64)
        warps = min(most, 65536 // (-(-k["registers"] * 32 // 256) * 256))
        note = ""
        if k["spills"] or k["stack"]:
            note = f"  SPILLS {k['spills']} bytes, stack {k['stack']}"
            bad += 1
        print(f"{names.get(name, name):56} {arch:4} {k['registers']:5} {k['shared']:7} {warps:3}/{most}{note}")
    print(f"{len(found)} kernels, {bad} faults")
    return bad != 0 or not found


sys.exit(main())
