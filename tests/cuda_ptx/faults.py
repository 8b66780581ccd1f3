# SPDX-License-Identifier: Apache-2.0
"""Faults are put into nvcc's PTX of a kernel, one at a time; each must be reported, in its words. What is not PTX that
ptx2c.py knows must be refused.

faults.py SOURCE_DIR BUILD_DIR CXX...: the kernel is changed, translated, compiled as a shared object and takes the place of
the program's (MT_PTX_KERNELS).
"""
import os
import re
import subprocess
import sys
import tempfile

SOURCE, BUILD, *CXX = sys.argv[1:]
FOLD = ("fold", "fold_columns", ["conformance-ptx-80", "cuda", "bias"])
GLU = ("glu", "glu_forwardI4bf16Li8ELi0", ["conformance-ptx-80", "cuda", "gated_units_match"])
ROWS = ("norm", "norm_forwardI4bf16Li2ELb0ELb0E", ["conformance-ptx-80", "cuda", "rmsnorm_matches"])
FLASH = ("flash_queries", "flash_queriesILi64", ["conformance-ptx-80", "cuda", "attention_of_odd"])
FLASH_KEYS = ("flash_keys", "flash_keysILi64", FLASH[2])
FLASH_FORWARD = ("flash_forward", "flash_forwardILi64", FLASH[2])
OWN = {"MEGATRAIN_ATTENTION": "own"}
GLOBAL = {"MT_PTX_GLOBAL": "1", "MT_EMU_WORKERS": "1"}

# name, where, what becomes what (the first place where it matches, or the n-th), words of the report, environment
FAULTS = [
    ("no barrier", FOLD, r"bar\.sync \t?0;", "", 1, ["shared byte"], {}),  # a race, or read before it is written
    ("divergent barrier", FOLD, r"bar\.sync \t?0;", "@!%p1 ret; bar.sync 0;", 1, ["divergent barrier"], {}),
    ("wrong butterfly", FOLD, r"(mov\.u32 \t%r\d+, )8;", r"\g<1>4;", 1, ["FAIL cuda"], {}),
    ("half the mask", FOLD, r"(mov\.u32 \t%r\d+, )-1;", r"\g<1>65535;", 1, ["mask 0x0000ffff"], {}),
    ("store off by 8", FOLD, r"(st\.global\.f32 \t\[%rd\d+)\]", r"\1+8]", 1, ["FAIL cuda"], {}),
    ("store misaligned by 2", FOLD, r"(st\.global\.f32 \t\[%rd\d+)\]", r"\1+2]", 1, ["misaligned", "of global memory"], {}),
    ("shared store misaligned by 2", FOLD, r"(st\.shared\.f32 \t\[%r\d+)\]", r"\1+2]", 1, ["misaligned", "shared"], {}),
    ("far out of bounds", FOLD, r"(st\.global\.f32 \t\[%rd\d+)\]", r"\1+1073741824]", 1, ["device memory"], {}),
    ("small shared array", FOLD, r"\[4224\]", "[4096]", 1, ["out of bounds", "of shared memory"], {}),
    ("nothing stored in shared memory", FOLD, r"st\.shared\.f32 .*?;", "", 1, ["shared byte", "never written"], {}),
    ("unset register", FOLD, r"mov\.f32 \t(%f\d+), 0f00000000;", "", 1, ["is read and was never written"], {}),
    (".nc where in place", FOLD, r"ld\.global\.f32", "ld.global.nc.f32", 1, ["read as constant (.nc)"], GLOBAL),
    ("blocks that overlap", FOLD, r"(mul\.wide\.u32 \t%rd\d+, %r\d+, )32;", r"\g<1>16;", 1, ["race: global memory", "another block"],
     GLOBAL),
    ("more threads than bounds", FOLD, r"\.maxntid 1024, 1, 1", ".maxntid 512, 1, 1", 1, ["launch bounds"], {}),
    ("many threads without bounds", FOLD, r"\.maxntid 1024, 1, 1", "", 1, ["launch bounds: 1024, of 256"], {}),
    ("swapped bf16 pair", GLU, r"(cvt\.rn\.bf16x2\.f32 %r\d+, )(%f\d+), ?(%f\d+)", r"\1\3, \2", 1, ["FAIL cuda"], {}),
    ("guard off by one", GLU, r"setp\.ge\.u64", "setp.gt.u64", 2, ["FAIL cuda"], {}),
    ("no barrier before another warp's sum", ROWS, r"bar\.sync \t?0;", "", 1, ["shared byte"], {}),
    ("no wait for a copy", FLASH_FORWARD, r"cp\.async\.wait_group 0;", "", 1, ["is the target of a copy of thread", "not been waited for"], OWN),
    ("no barrier after a copy", FLASH_FORWARD, r"bar\.sync \t?0;", "", 1, ["shared byte"], OWN),
    ("a row of fragments 8 bytes off", FLASH_FORWARD, r"(ldmatrix\S+ \{[^}]*\}, \[%r\d+)\]", r"\1+8]", 1, ["misaligned", "shared"], OWN),
    ("not transposed", FLASH_FORWARD, r"\.trans", "", 1, ["FAIL cuda"], OWN),
    ("columns of one bank", FOLD, r", 132, ", ", 128, ", 0, ["bank conflict: lanes 0 to 31 take 32 wavefronts"],
     {"MT_PTX_BANKS": "fold_columns"}),
    ("a register of which half is unset", FOLD, r"mov\.f32 \t(%f\d+), 0f00000000;",
     r".reg .b64 %half; .reg .b32 %none; mov.b64 %half, {%r1, %none}; cvt.u32.u64 %none, %half; mov.b32 \1, %none; "
     r"add.s64 %half, %half, 1; mov.f32 \1, 0f00000000;", 1, ["register %half is read and was never written"], {}),
    ("dq: no barrier behind a tile", FLASH, r"bar\.sync \t?0;", "", 2, ["race: shared byte"], OWN),
    ("dq: a wait for too few copies", FLASH, r"wait_group 1;", "wait_group 2;", 1, ["not been waited for"], OWN),
    ("dk, dv: no barrier before a tile", FLASH_KEYS, r"bar\.sync \t?0;", "", 1, ["shared byte"], OWN),
    ("dk, dv: swapped pairs", FLASH_KEYS, r"(cvt\.rn\.bf16x2\.f32 %r\d+, )(%f\d+), ?(%f\d+)", r"\1\3, \2", 1, ["FAIL cuda"], OWN),
    ("forward: a row not followed by its neighbours", FLASH_FORWARD, r"shfl\.sync\.bfly\.b32", "shfl.sync.idx.b32", 1, ["FAIL cuda"], OWN),
    ("forward: a tile of values too early", FLASH_FORWARD, r"bar\.sync \t?0;", "", 2, ["shared byte"], OWN),
    ("a copy of what is not aligned", FLASH_FORWARD, r"(cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+)\]", r"\1+8]", 2,
     ["misaligned", "a copy of 16 bytes"], OWN),
]


# What the translation does not know, or cannot get right, it refuses.
REFUSED = [
    (FOLD, r"add\.rn\.f32", "add.f32", "add.f32 is not known"),  # the assembler may fuse it with a product
    (FOLD, r"bar\.sync \t?0;", "bar.sync 1;", "a barrier other than 0"),
    (FLASH_FORWARD, r"mma\.sync\S*", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "not modelled: products of 8"),
    (FOLD, r"add\.rn\.f32", "lg2.approx.f32", "not modelled: this approximation"),
    (FOLD, r"st\.global\.f32", "st.volatile.global.f32", "st.volatile.global.f32 is not known"),
    (FOLD, r"add\.rn\.f32 (\t%f\d+)", r"add.rn.f32 \g<1>999", "unknown register"),
    (FOLD, r"setp\.ne\.s32", "setp.huge.s32", "comparison huge"),
    (FOLD, r"\.maxntid", ".maxnreg", "not understood"),
]


def kernel_alone(text, name):
    """The file's head, its shared variables and the one kernel."""
    head, *entries = re.split(r"(?m)^(?=(?:\.visible )?\.entry )", text)
    mine = [e for e in entries if name in e.split("(")[0]]
    assert len(mine) == 1, f"{len(mine)} kernels are named {name}"
    shared = re.findall(r"(?m)^\.(?:extern )?shared .*;$", text)
    return re.sub(r"(?m)^\.shared .*;$", "", head) + "\n".join(shared) + "\n" + re.sub(r"(?m)^\.shared .*;$", "", mine[0])


def replace_nth(text, pattern, by, n):
    if not n:
        return re.sub(pattern, by, text)
    m = list(re.finditer(pattern, text))
    assert len(m) >= n, f"{pattern} matches {len(m)} times"
    m = m[n - 1]
    return text[:m.start()] + m.expand(by) + text[m.end():]


def build(tmp, text):
    base = os.path.join(tmp, "fault")
    with open(base + ".ptx", "w") as f:
        f.write(text)
    subprocess.run([sys.executable, os.path.join(SOURCE, "ptx2c.py"), base + ".ptx", base + ".cpp"], check=True)
    include = os.path.join(SOURCE, "..", "cuda_host", "include")
    subprocess.run([*CXX, "-std=gnu++17", "-O0", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-I", SOURCE, "-I", include,
                    base + ".cpp", "-o", base + ".so"], check=True)
    return base + ".so"


def reported(tmp, where, text, words, env):
    """What is wrong with the report, or None."""
    so = build(tmp, text)
    program, *args = where[2]
    e = {**os.environ, "MT_PTX_KERNELS": so, "MT_EMU_SEED": "2", "MEGATRAIN_ATTENTION": "tiled", **env}
    p = subprocess.run([os.path.join(BUILD, program), *args], env=e, capture_output=True, text=True, timeout=200)
    out = p.stdout + p.stderr
    first = next((line for line in out.splitlines() if words and words[0] in line), out.strip()[-1000:])
    if words and (p.returncode == 0 or not all(w in out for w in words)):
        return f"exit {p.returncode}, expected {words}:\n{out[-2000:]}"
    if not words and p.returncode:
        return f"exit {p.returncode} without a fault:\n{out[-2000:]}"
    print(f"    {first}", flush=True)
    return None


def refused(tmp, text, words):
    """What is wrong with the refusal, or None."""
    path = os.path.join(tmp, "refused.ptx")
    with open(path, "w") as f:
        f.write(text)
    p = subprocess.run([sys.executable, os.path.join(SOURCE, "ptx2c.py"), path, os.path.join(tmp, "refused.cpp")],
                       capture_output=True, text=True)
    return None if p.returncode and words in p.stderr else f"exit {p.returncode}, expected '{words}': {p.stderr[-500:]}"


def main():
    failures = 0
    with tempfile.TemporaryDirectory() as tmp:
        whole = {}
        for where in FOLD, GLU, ROWS, FLASH, FLASH_KEYS, FLASH_FORWARD:
            with open(os.path.join(BUILD, where[0] + "-80.ptx")) as f:
                whole[where[1]] = kernel_alone(f.read(), where[1])
        clean = [("without a fault", w, "", "", 0, [], {**GLOBAL, **OWN, "MT_PTX_BANKS": w[1]}) for w in (FOLD, FLASH_FORWARD)]
        for name, where, pattern, by, n, words, env in clean + FAULTS:
            print(f"{name} ({where[1]})", flush=True)
            text = whole[where[1]]
            wrong = reported(tmp, where, replace_nth(text, pattern, by, n) if pattern else text, words, env)
            if wrong:
                print(f"NOT REPORTED: {name}: {wrong}", flush=True)
                failures += 1
        for where, pattern, by, words in REFUSED:
            wrong = refused(tmp, replace_nth(whole[where[1]], pattern, by, 1), words)
            print(f"NOT REFUSED: {pattern} -> {by}: {wrong}" if wrong else f"refused: {words}", flush=True)
            failures += bool(wrong)
    print(f"{len(FAULTS)} faults, {len(REFUSED)} refusals, {failures} failures")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
