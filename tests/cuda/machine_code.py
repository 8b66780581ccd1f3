#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""machine_code.py [--expect WORDS]... OBJECT... [-- PTX...]: what the assembler made of each kernel, counted in the machine code itself.

An object of nvcc holds an ELF file an architecture; an instruction has 16 bytes, its opcode in the low 12 bits and an
access's width in bits 73 to 75 (sm_80 to sm_120). Fails where a kernel touches local memory, calls where its PTX has no
division or square root to call for, has other barriers than its PTX, fewer accesses of 16 bytes, other numbers of
tensor-core products, fragment loads and asynchronous copies, or, of those that move most bytes, no accesses of 16 bytes. With --expect it fails where a fault of these words is not found.
"""
import collections
import re
import struct
import subprocess
import sys

OPCODES = {}
for _name, _codes in {"LDG": (0x381, 0x981), "STG": (0x386, 0x986), "LDL": (0x383, 0x983), "STL": (0x387, 0x987),
                      "BAR": (0x31d, 0xb1d), "CALL": (0x343, 0x344, 0x943, 0x944), "EXIT": (0x94d,),
                      "HMMA": (0x23c,), "LDSM": (0x83b,), "LDGSTS": (0xfae,), "MUFU": (0x308,)}.items():
    OPCODES.update(dict.fromkeys(_codes, _name))
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}
# Kernels that read and write packs of 16 bytes: a loop of narrower accesses would halve their speed.
HOT = re.compile(r"((rms|layer)norm_(forward|backward)<|((expert_)?glu_(forward|backward)|gather|combine)<(bf16, 8|float, 4)[,>]|"
                 r"rope_(forward|norm_backward)<|cross_entropy<float, true>|cast_and_sum<float, true>|softmax_rows<float>)")
DIVISION = re.compile(r"\s(?:div\.rn|sqrt\.rn|rcp\.rn|(?:div|rem)\.[us]64)")
COLLECTIVE = re.compile(r"\s(?:shfl|vote|mma|ldmatrix)\.sync")  # before sm_90 some are calls, where lanes may have parted


def cuda_elfs(data):
    """Offsets of the device code's ELF files (machine 190)."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == 190:
            yield data[at:]
        at = data.find(b"\x7fELF", at + 4)


def kernels(elf):
    """(mangled name, machine code) of an ELF file."""
    table, = struct.unpack_from("<Q", elf, 0x28)
    n, names = struct.unpack_from("<HH", elf, 0x3c)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(n)]
    for s in sections:
        start = sections[names][4] + s[0]
        name = elf[start:elf.index(b"\0", start)].decode()
        if name.startswith(".text."):
            yield name[len(".text."):], elf[s[4]:s[4] + s[5]]


def count(code):
    """{"LDG.16": n, "BAR": n, ...}"""
    c = collections.Counter()
    for low, high in struct.iter_unpack("<QQ", code):
        name = OPCODES.get(low & 0xfff)
        if name in ("LDG", "STG", "LDL", "STL"):
            name += f".{WIDTHS.get(high >> 9 & 7, '?')}"
        if name:
            c[name] += 1
    return c


def read_ptx(paths):
    """{(whether of the newer compiler, mangled name): the kernel's text}"""
    found = {}
    for path in paths:
        with open(path) as f:
            text = f.read()
        newer = int(re.search(r"\.target sm_(\d+)", text).group(1)) >= 100
        for entry in re.split(r"(?m)^(?=(?:\.visible )?\.entry )", text)[1:]:
            found[newer, re.search(r"\.entry (\w+)", entry).group(1)] = entry
    return found


def faults(name, arch, c, ptx):
    local = sum(n for k, n in c.items() if k[:3] in ("LDL", "STL"))
    if local:
        yield f"{local} accesses to local memory"
    if not c["EXIT"]:
        yield "no end: this is not the machine code that is known here"
    if HOT.match(name) and not (c["LDG.16"] and c["STG.16"]):
        yield "no loads and stores of 16 bytes"
    if ptx is None:
        if c["CALL"]:
            yield f"{c['CALL']} calls"
        return
    if c["CALL"] and not DIVISION.search(ptx) and not (arch < 90 and COLLECTIVE.search(ptx)):
        yield f"{c['CALL']} calls"
    barriers = len(re.findall(r"\sbar\.sync", ptx))
    if c["BAR"] != barriers:
        yield f"{c['BAR']} barriers, {barriers} in PTX"
    for sass, opcode in ("LDG.16", r"\sld\.global\S*\.v4\.[usbf]32"), ("STG.16", r"\sst\.global\S*\.v4\.[usbf]32"):
        wanted = len(re.findall(opcode, ptx))
        if c[sass] < wanted:
            yield f"{c[sass]} {sass}, {wanted} in PTX"
    # products, loads of fragments and asynchronous copies are what they were: none is emulated or done twice
    for sass, opcode in ("HMMA", r"\smma\.sync"), ("LDSM", r"\sldmatrix\.sync"), ("LDGSTS", r"\scp\.async\.c[ag]\."):
        wanted = len(re.findall(opcode, ptx))
        if c[sass] != wanted:
            yield f"{c[sass]} {sass}, {wanted} in PTX"


def main(args):
    expected = []
    while args[0] == "--expect":
        expected.append(args[1])
        args = args[2:]
    at = args.index("--") if "--" in args else len(args)
    ptx, rows, said, n_bad = read_ptx(args[at + 1:]), [], [], 0
    for path in args[:at]:
        with open(path, "rb") as f:
            data = f.read()
        found = [(struct.unpack_from("<I", elf, 0x30)[0] >> 8 & 0xff, name, count(code))
                 for elf in cuda_elfs(data) for name, code in kernels(elf)]
        if not found:
            print(f"{path}: no kernel")
            n_bad += 1
        rows += found
    plain = subprocess.run(["c++filt"], input="\n".join(r[1] for r in rows), capture_output=True, text=True).stdout
    table = [(re.sub(r"^void |\(.*", "", name), *row) for name, row in zip(plain.splitlines(), rows)]
    print(f"{'kernel':44} {'sm':>4} {'loads of 16, 8, 4, 2':>22} {'stores of 16, 8, 4, 2':>22} {'barriers':>8} {'calls':>5}  of tensor cores")
    for name, arch, mangled, c in sorted(table, key=lambda r: r[:2]):
        widths = [" ".join(f"{c[f'{op}.{w}']:4}" for w in (16, 8, 4, 2)) for op in ("LDG", "STG")]
        print(f"{name:44} {arch:4} {widths[0]:>22} {widths[1]:>22} {c['BAR']:8} {c['CALL']:5}"
              + ("  " + ", ".join(f"{op} {c[op]}" for op in ("HMMA", "LDSM", "LDGSTS", "MUFU")) if c["HMMA"] else ""))
        if ptx and (arch >= 100, mangled) not in ptx:
            print("    its PTX is not here")
            n_bad += 1
        for what in faults(name, arch, c, ptx.get((arch >= 100, mangled))):
            print(f"    {what}")
            n_bad += 1
            said.append(what)
    print(f"{len(rows)} kernels, {n_bad} faults")
    if expected:
        return not all(any(words in what for what in said) for words in expected)
    return n_bad != 0 or not rows


sys.exit(main(sys.argv[1:]))
