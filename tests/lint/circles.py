#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""circles.py ROOT: few files call each other in a circle. A file calls another if it calls a function that only that one
defines. A name in a table is no call: a table lists what a caller chooses from. At most MOST circles, of at most
LARGEST files each: numbers to lower, never to raise."""
import collections
import os
import re
import sys

MOST, LARGEST = 0, 0
ENDINGS = (".c", ".cc", ".cu")
QUIET = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.S)  # comments and strings
FUNCTION = re.compile(r"^(?!static|typedef)(?:extern \"C\" )?\w[\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)


def read_all(root):
    """{path: text without comments and strings}"""
    files = {}
    for top in ("src", "cuda", "cli"):
        for folder, _, names in sorted(os.walk(os.path.join(root, top))):
            for path in (os.path.join(folder, name) for name in names if name.endswith(ENDINGS)):
                with open(path, encoding="utf-8") as f:
                    files[os.path.relpath(path, root)] = QUIET.sub(" ", f.read())
    return files


def definitions(files):
    """{function: the file that defines it}; one that two files define is nobody's."""
    where = collections.defaultdict(set)
    for path, text in files.items():
        for name in FUNCTION.findall(text):
            where[name].add(path)
    return {name: paths.pop() for name, paths in where.items() if len(paths) == 1}


def calls(files):
    """{file: {file that it calls: functions}}"""
    where = definitions(files)
    called = {path: collections.defaultdict(set) for path in files}
    for path, text in files.items():
        for name in re.findall(r"\b\w+(?=\()", text):
            if where.get(name, path) != path:
                called[path][where[name]].add(name)
    return called


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


def main(root):
    sys.setrecursionlimit(10000)
    called = calls(read_all(root))
    found = circles(called)
    for group in found:
        print(f"{len(group)} files: {' '.join(group)}")
        for a in group:
            for b in sorted(set(called[a]) & set(group)):
                print(f"  {a} calls {b}: {' '.join(sorted(called[a][b]))}")
    largest = max(map(len, found), default=0)
    print(f"{len(called)} files, {len(found)} circles (at most {MOST}), the largest of {largest} files (at most {LARGEST})")
    return len(found) > MOST or largest > LARGEST or not any(called.values())


sys.exit(main(sys.argv[1]))
