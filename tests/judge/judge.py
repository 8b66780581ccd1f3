#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the models compute what they computed before: the texts of tests/judge/judge.c, by their digests, for all
models of configs/models and all fixtures of tests/parity.

    judge.py check BUILD         compares with tests/judge/digests.txt, and looks whether a seeded overlap is seen
    judge.py write BUILD         writes digests.txt, after a change of what is computed that is meant
    judge.py diff OLD NEW [N]    the first N differences (3) of two builds' texts, by model and variant"""
import difflib
import os
import subprocess
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
STORED = os.path.join(ROOT, "tests", "judge", "digests.txt")
VARIANTS = ("f32 bf16 recompute halves eval fp8 frozen lora dora packed packed-fp8 balance weighed cuda "
            "muon apollo galore adafactor").split()


def models():
    """{name: path}"""
    out = {}
    for folder in ("configs/models", "tests/parity"):
        for name in sorted(os.listdir(os.path.join(ROOT, folder))):
            path = os.path.join(ROOT, folder, name)
            if folder == "configs/models" and name.endswith(".json"):
                out[name[:-5]] = path
            elif os.path.exists(os.path.join(path, "config.json")):
                out[name] = path
    return out


def judge(build, what, paths):
    """Its output, and what it says on stderr."""
    p = subprocess.run([os.path.join(build, "tests/judge/judge"), what, *paths], capture_output=True, text=True)
    if p.returncode not in (0, 1) or (p.returncode and "are read where" not in p.stderr):
        sys.exit(f"judge.py: {what}: exit {p.returncode}: {p.stderr}")
    return p.stdout, "".join(x for x in p.stderr.splitlines(True) if x.startswith("judge:"))


def digests(build):
    text, wrong = judge(build, "digests", models().values())
    return text, wrong


def table(text):
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def differences(old, new):
    """[(model, variant)] of two tables."""
    out = []
    for name in sorted(set(old) | set(new)):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            out.append((name, "not in the new table" if b is None else "not in the stored table"))
        else:
            out += [(name, v) for v, x, y in zip(VARIANTS, a, b) if x != y]
    return out


def check(build):
    text, wrong = digests(build)
    found = differences(table(open(STORED).read()), table(text))
    for name, variant in found[:20]:
        print(f"{name} {variant}: what is computed differs from what was")
    if found:
        print(f"{len(found)} of {len(table(text)) * len(VARIANTS)} texts differ. See how: tests/judge/judge.py diff "
              "OLD_BUILD NEW_BUILD. If it is meant: tests/judge/judge.py write BUILD")
    if wrong:
        print(wrong + "Find them: build/tests/judge/judge VARIANT MODEL | grep '?'")
    blind = [m for m in ("qwen3", "gemma3_text", "mixtral", "deepseek_v3")
             if m in models() and judge(build, "overlap", [models()[m]])[0] == judge(build, "bf16", [models()[m]])[0]]
    if blind:
        print("an overlap of two arrays in scratch is not seen: " + ", ".join(blind))
    return 1 if found or wrong or blind else 0


def diff(old, new, most):
    a, b = (table(digests(x)[0]) for x in (old, new))
    for name, variant in differences(a, b)[:most]:
        print(f"=== {name}, {variant}")
        if variant in VARIANTS:
            texts = [judge(x, variant, [models()[name]])[0].splitlines() for x in (old, new)]
            print("\n".join(list(difflib.unified_diff(*texts, "old", "new", lineterm="", n=1))[:40]))
    return 0


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "check":
        return check(sys.argv[2])
    if len(sys.argv) == 3 and sys.argv[1] == "write":
        open(STORED, "w").write(digests(sys.argv[2])[0])
        return 0
    if len(sys.argv) in (4, 5) and sys.argv[1] == "diff":
        return diff(sys.argv[2], sys.argv[3], int((sys.argv + ["3"])[4]))
    print(__doc__, file=sys.stderr)
    return 2


sys.exit(main())
