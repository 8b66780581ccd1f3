#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""circles.py ROOT: few files need each other in a circle. A file is a source with the headers of its name (x.c, x.h and
x_priv.h). It calls another if it, or a function in its headers, calls a function that only that one defines, in a header
or not. A name in a table is no call: a table lists what a caller chooses from. At most MOST circles, of at most LARGEST
files each: numbers to lower, never to raise. No header includes itself by way of others."""
import collections
import os
import re
import sys

MOST, LARGEST = 0, 0
SOURCES, HEADERS = (".c", ".cc", ".cu"), (".h", ".cuh")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
STRING = re.compile(r"\"(?:\\.|[^\"\\\n])*\"")
FUNCTION = re.compile(r"^(?!typedef|__)(static )?(?:inline |__\w+__ |extern \"C\" )*\w[\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)
BODY = re.compile(r"\)\s*\n\{.*?^\}", re.M | re.S)
INCLUDE = re.compile(r"^#include \"([^\"]+)\"", re.M)


def read_all(root):
    """{path: text without comments}"""
    files = {}
    for top in ("src", "cuda", "cli"):
        for folder, _, names in sorted(os.walk(os.path.join(root, top))):
            for path in (os.path.join(folder, name) for name in names if name.endswith(SOURCES + HEADERS)):
                with open(path, encoding="utf-8") as f:
                    files[os.path.relpath(path, root)] = COMMENT.sub(" ", f.read())
    return files


def name_of(path, files):
    """What a source and its headers have in common: their path without endings."""
    stem = os.path.splitext(path)[0]
    own = stem.removesuffix("_priv")
    return own if any(own + ending in files for ending in SOURCES) else stem


def functions(path, text):
    """The functions that others can call, and those of the file alone."""
    shared, alone = set(), set()
    for static, name in FUNCTION.findall(text):
        (alone if static and not path.endswith(HEADERS) else shared).add(name)
    return shared, alone


def definitions(files):
    """{function: what defines it}; one that two define is nobody's."""
    where = collections.defaultdict(set)
    for path, text in files.items():
        for name in functions(path, text)[0]:
            where[name].add(name_of(path, files))
    return {name: paths.pop() for name, paths in where.items() if len(paths) == 1}


def calls(files):
    """{name_of(): {what it calls: functions}}"""
    where = definitions(files)
    called = {name_of(path, files): collections.defaultdict(set) for path in files}
    for path, text in files.items():
        own, alone = name_of(path, files), functions(path, text)[1]
        bodies = " ".join(BODY.findall(text)) if path.endswith(HEADERS) else text
        for name in re.findall(r"\b\w+(?=\()", STRING.sub(" ", bodies)):
            if name not in alone and where.get(name, own) != own:
                called[own][where[name]].add(name)
    return called


def includes(files):
    """{file: {file that it includes: as it says}}"""
    included = {path: {} for path in files}
    for path, text in files.items():
        for name in INCLUDE.findall(text):
            for folder in ("src", "", os.path.dirname(path)):
                if os.path.normpath(os.path.join(folder, name)) in files:
                    included[path][os.path.normpath(os.path.join(folder, name))] = {name}
                    break
    return included


def circles(called):
    """The groups of files that reach each other (Tarjan 1972)."""
    order, low, stack, found = {}, {}, [], []

    def visit(v):
        order[v] = low[v] = len(order)
        stack.append(v)
        for w in sorted(called[v]):
            if w not in order:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], order[w])
        if low[v] == order[v]:
            at = stack.index(v)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for v in sorted(called):
        if v not in order:
            visit(v)
    return sorted(group for group in found if len(group) > 1)


def tell(called, verb):
    """Prints the circles; how many there are, and of how many files the largest is."""
    found = circles(called)
    for group in found:
        print(f"{len(group)} files: {' '.join(group)}")
        for a in group:
            for b in sorted(set(called[a]) & set(group)):
                print(f"  {a} {verb} {b}: {' '.join(sorted(called[a][b]))}")
    return len(found), max(map(len, found), default=0)


def main(root):
    sys.setrecursionlimit(10000)
    files = read_all(root)
    called, included = calls(files), includes(files)
    n, largest = tell(called, "calls")
    n_included, _ = tell(included, "includes")
    print(f"{len(called)} files, {n} circles of calls (at most {MOST}), the largest of {largest} files (at most {LARGEST}); "
          f"{n_included} of includes (none)")
    return n > MOST or largest > LARGEST or n_included or not any(called.values()) or not any(included.values())


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1])))
