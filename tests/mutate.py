#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which seeded faults does the first tier see?
  mutate.py [--seed N] [--faults N] [--numbers A-B] [--rest] DIR
Draws faults from the seed: an operator, a bound or an index of a random line in a function of each folder of src, of cuda and
of cli, then of folders by their size. In DIR, a copy of the last commit with a build of its own (made if it is not there), puts
in one fault at a time, builds, and runs the first tier, tests of that folder first, until one fails. One that does not compile,
or leaves the object as it was, is drawn again. A fault that is missed may be equivalent: read it. --rest: a missed fault is also
tried on the other tests. Results are kept in DIR/results.jsonl: a second call goes on."""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tiers  # noqa: E402

# Which change of a line of code; strings and comments are blanked.
CHANGES = [(r"<=", "<"), (r"(?<![<\-])<(?![<=])", "<="), (r">=", ">"), (r"(?<![>\-])>(?![>=])", ">="), (r"==", "!="), (r"!=", "=="),
           (r"&&", "||"), (r"\|\|", "&&"), (r"(?<=\w|\)|\]) \+ (?=\w|\()", " - "), (r"(?<=\w|\)|\]) - (?=\w|\()", " + "),
           (r"(?<=\w|\)|\]) \* (?=\w|\()", " + "), (r"(?<=\w|\)|\]) / (?=\w|\()", " * "), (r"\+=", "-="), (r"-=", "+="),
           (r"(?<=\w\[)(\w+)(?=\])", r"\1 + 1"), (r"(?<![\w.])(\d+)(?![\w.])", r"(\1 + 1)"), (r"(?<=[(\s])!(?=[\w(])", ""),
           (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"\bMT_MIN\(", "MT_MAX("), (r"\bMT_MAX\(", "MT_MIN(")]
# Tests that see most of a folder's faults, besides those of tests/unit/<folder>.
NEAR = {"src/device": ["device/conformance-cpu"], "src/optim": ["parity/optimizers"], "src/kinds": ["device/conformance-cpu"],
        "cuda": ["device/cuda-host-side-locked", "cuda-emu/head", "device/conformance-cuda-emu-2", "device/cuda-attention"],
        "src/hf": ["parity/qwen3", "parity/gpt_oss"], "src/model": ["parity/qwen3", "parity/deepseek_v3"],
        "src/weights": ["parity/qwen3", "cli/packed-nf4"], "src/checkpoint": ["cli/runs-first", "cli/merges"],
        "src/train": ["cli/runs-first"], "src/data": ["cli/data-first", "cli/preference-data"], "src/report": ["cli/bench-first"],
        "src/sweep": ["cli/bench-first"], "src/machine": ["cli/plan-first", "cli/bench-first"], "src/hw": ["cli/plan-first"],
        "src/plan": ["cli/plan-first"], "src/config": ["cli/errors"], "src/settings": ["cli/errors", "cli/runs-first"],
        "src/objective": ["parity/preference", "cli/preference-first"], "src/net": ["cli/hosts-hosts_have_the_bits_of_one"],
        "src/schedule": ["cli/lanes-dense"], "src/engine": ["parity/qwen3", "cli/lanes-dense"], "src/store": ["cli/runs-first"],
        "cli": ["cli/errors", "cli/plan-first", "cli/readme", "cli/sample"]}
DEAR = re.compile(r"cuda-emu|^cli/(bits|memory|bench|data-files|readme|learners)|^fault|^store/test_disk$")


# A declaration of arrays, which one element more does no harm.
ARRAY = re.compile(r"\s*(?!return)(static |const )*(struct )?\w+ (\w+(\[\d+\])+(, )?)+;$")


def blanked(line):
    line = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', lambda m: " " * len(m[0]), line)
    return re.sub(r"//.*|/\*.*?(\*/|$)", lambda m: " " * len(m[0]), line)


def lines_of(path):
    """(number, text, blanked text) of the lines within functions: indented, no comment, no declaration of a prototype."""
    with open(path, encoding="utf-8") as f:
        comment = False
        for number, line in enumerate(f, 1):
            began = comment
            comment = (comment or "/*" in line) and "*/" not in line.rpartition("/*")[2]
            if not began and line[:1] == " " and not line.strip().startswith(("*", "/*", "//", "#")):
                yield number, line, blanked(line)


def compiled(build):
    """The sources that a build compiles, the kernels among them."""
    with open(os.path.join(build, "compile_commands.json")) as f:
        found = {os.path.relpath(os.path.realpath(os.path.join(c["directory"], c["file"])), os.path.realpath(build + "/..")) for c in json.load(f)}
    kernels = os.path.join(os.path.dirname(build), "cuda", "kernels")
    return found | {"cuda/kernels/" + f for f in os.listdir(kernels) if f.endswith((".cu", ".cuh"))}


def folders(tree, build):
    """folder -> its sources, with (number of the line, text, blanked text)."""
    out = {}
    for path in sorted(compiled(build)):
        top = re.match(r"src/\w+(?=/)|cuda(?=/)|cli(?=/)", path)
        if top and path.endswith((".c", ".cu", ".cuh")):
            out.setdefault(top[0], []).extend((path, *line) for line in lines_of(os.path.join(tree, path)))
    return out


def changes_of(code):
    return [(m.start(), m.end(), m.expand(new)) for old, new in CHANGES for m in re.finditer(old, code)]


def draw(rng, lines):
    """A fault: (path, number of the line, text, changed text)."""
    while True:
        path, number, text, code = rng.choice(lines)
        found = [] if ARRAY.match(code) else changes_of(code)
        if found:
            start, end, new = rng.choice(found)
            return path, number, text, text[:start] + new + text[end:]


def quiet(*command, cwd=None):
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def prepare(tree):
    if not os.path.isdir(tree):
        os.makedirs(tree)
        subprocess.run(f"git -C '{ROOT}' archive HEAD | tar -x -C '{tree}'", shell=True, check=True)
        for env in (".venv-data", ".venv"):
            os.symlink(os.path.join(ROOT, env), os.path.join(tree, env))
    build = os.path.join(tree, "build")
    if not os.path.isdir(build):
        subprocess.run(["meson", "setup", build, tree, "-Dcuda=disabled", "-Dtests=enabled", "--werror"], check=True, stdout=subprocess.DEVNULL)
    make(build, tiers.targets(build, tiers.first(build)))
    return build


def make(build, targets):
    said = quiet("ninja", "-j2", "-C", build, *targets)
    return said.returncode == 0


def code_of(build):
    """What tells one build of the program and its kernels from another."""
    return quiet("sh", "-c", "find src cuda cli tests/cuda_host/libmt* -name '*.o' | sort | xargs md5sum", cwd=build).stdout


def times(build):
    """Processor seconds of each test so far."""
    try:
        with open(os.path.join(build, "times")) as f:
            return {name: float(used) for name, used, _ in (line.split("\t") for line in f)}
    except OSError:
        return {}


def rounds(build, folder):
    """Names of the first tier's tests in the order in which they are tried, in groups: the quick ones before the others."""
    tests = [t for t in tiers.introspected(build, "tests") if "first" in tiers.suites(t) and "lint" not in tiers.suites(t)]
    own = {t["name"] for t in tests if t["name"].startswith(os.path.basename(folder) + "/")} if folder != "cli" else set()
    groups, seen = [], set()
    cost = times(build)
    quick = sorted((t["name"] for t in tests if not DEAR.search(t["name"])), key=lambda n: cost.get(n, 1))
    for names in (sorted(own - {n for n in own if DEAR.search(n)}), NEAR.get(folder, []), quick[:len(quick) // 2], quick,
                  sorted(t["name"] for t in tests)):
        groups.append([n for n in names if n not in seen and n in {t["name"] for t in tests}])
        seen.update(names)
    return [g for g in groups if g]


def failing(build, names):
    """The first of the tests that fails, or None."""
    ids = {i for t in tiers.introspected(build, "tests") if t["name"] in names for i in t["depends"]}
    files = {t["id"]: t["filename"] for t in tiers.introspected(build, "targets")}
    if not make(build, [os.path.relpath(f, os.path.realpath(build)) for i in ids for f in files.get(i, [])]):
        return "the build"
    log = os.path.join(build, "meson-logs", "testlog.json")
    if os.path.exists(log):
        os.remove(log)
    os.environ["MEGATRAIN_TEST_TIMES"] = os.path.join(build, "times")
    quiet("meson", "test", "-C", build, "--no-rebuild", "--num-processes", "2", "--maxfail", "1", *names)
    with open(log) as f:
        for line in f:
            r = json.loads(line)
            if r["result"] in ("FAIL", "ERROR", "TIMEOUT"):
                return r["name"].split(" / ")[-1].split(":")[-1].strip()
    return None


def try_fault(tree, build, folder, fault, rest):
    """(seen by, seconds); None: it does not compile or changes nothing."""
    path, number, text, changed = fault
    began, before = time.time(), code_of(build)
    with open(os.path.join(tree, path), encoding="utf-8") as f:
        whole = f.read().split("\n")
    assert whole[number - 1] + "\n" == text
    broken = [*whole[:number - 1], changed.rstrip("\n"), *whole[number:]]
    with open(os.path.join(tree, path), "w", encoding="utf-8") as f:
        f.write("\n".join(broken))
    try:
        kernels = "tests/cuda_host/libmt_cuda_emu.a"
        if not make(build, ["program", kernels, "tests/cuda_host/libmt_cuda_emu_host.a"]) or code_of(build) == before:
            return None
        groups = rounds(build, folder)
        if rest:
            groups.append([t["name"] for t in tiers.beyond_first(build)])
        for i, names in enumerate(groups):
            name = failing(build, names)
            if name:
                return ("CI: " if rest and i == len(groups) - 1 else "") + name, time.time() - began
        return "", time.time() - began
    finally:
        with open(os.path.join(tree, path), "w", encoding="utf-8") as f:
            f.write("\n".join(whole))
        make(build, ["program"])


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--faults", type=int, default=40)
    p.add_argument("--rest", action="store_true")
    p.add_argument("--numbers", help="only these of the faults: several may be tried at a time, each in a DIR of its own")
    p.add_argument("dir")
    args = p.parse_args()
    tree = os.path.realpath(args.dir)
    os.environ["PATH"] = os.path.join(ROOT, ".venv", "bin") + os.pathsep + os.environ["PATH"]
    build = prepare(tree)
    results = os.path.join(tree, "results.jsonl")
    done = {}
    if os.path.exists(results):
        done = {r["number"]: r for r in map(json.loads, open(results))}
    of = folders(tree, build)
    rng = random.Random(args.seed)
    order = sorted(of) + rng.choices(sorted(of), [len(of[f]) for f in sorted(of)], k=max(args.faults - len(of), 0))
    rng.shuffle(order)
    first, last = map(int, (args.numbers or f"1-{args.faults}").split("-"))
    for number, folder in list(enumerate(order[:args.faults], 1))[first - 1:last]:
        draws = random.Random(f"{args.seed} {number}")
        while number not in done:
            fault = draw(draws, of[folder])
            got = try_fault(tree, build, folder, fault, args.rest)
            if got:
                path, line, text, changed = fault
                done[number] = {"number": number, "folder": folder, "at": f"{path}:{line}", "was": text.strip(), "is": changed.strip(),
                                "seen": got[0], "seconds": round(got[1])}
                with open(results, "a") as f:
                    f.write(json.dumps(done[number]) + "\n")
        r = done[number]
        print(f"{number:2} {r['at']}\n   - {r['was']}\n   + {r['is']}\n   {'seen by ' + r['seen'] if r['seen'] else 'MISSED'}", flush=True)
    seen = sum(bool(r["seen"]) and not r["seen"].startswith("CI") for r in done.values())
    print(f"{seen} of {len(done)} faults seen by the first tier")


main()
