#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""arrows.py ROOT: a reader of a folder can begin at the bottom. A file (as in circles.py) has an arrow to another of its
folder if it includes its header, or uses a function or a table that only that one defines. In the order of files in which
fewest arrows run back up, so many do at most: numbers to lower, never to raise."""
import collections
import os
import re
import sys

from circles import INCLUDE, STRING, definitions, name_of, read_all

MOST = {"src/model": 7}
TABLE = re.compile(r"^const struct \w+ (\w+)(?:\[\w*\])? =", re.M)


def arrows(files, folder):
    """{(from, to)}"""
    where = definitions(files)
    for path, text in files.items():
        where.update({name: name_of(path, files) for name in TABLE.findall(text)})
    inside, found = {p: t for p, t in files.items() if os.path.dirname(p) == folder}, set()
    for path, text in inside.items():
        own = name_of(path, files)
        to = {name_of(os.path.join("src", h), files) for h in INCLUDE.findall(text)}
        if path.endswith(".c"):
            to |= {where[w] for w in set(re.findall(r"\bmt_\w+", STRING.sub("", text))) if w in where}
        found |= {(own, t) for t in to if t != own and os.path.dirname(t) == folder}
    return found


def order(edges):
    """Files from the roof down: those that nobody needs first; where there are none, those that need more than they are
    needed (Eades, Lin and Smyth 1993). Then each goes to its best place until nothing gains."""
    left, top, bottom = {f for e in edges for f in e}, [], []
    while left:
        need = collections.Counter(a for a, b in edges if a in left and b in left)
        needed = collections.Counter(b for a, b in edges if a in left and b in left)
        f = min(sorted(left), key=lambda f: (bool(need[f]) and bool(needed[f]), needed[f] - need[f]))
        (bottom.insert(0, f) if not need[f] else top.append(f))
        left.discard(f)
    best = top + bottom
    for f in sorted(best) * 3:
        rest = [x for x in best if x != f]
        best = min((rest[:i] + [f] + rest[i:] for i in range(len(best))), key=lambda o: len(up(edges, o)))
    return best


def up(edges, files):
    at = {f: i for i, f in enumerate(files)}
    return sorted((a, b) for a, b in edges if at[a] > at[b])


def main(root):
    files, bad = read_all(root), 0
    for folder, most in MOST.items():
        edges = arrows(files, folder)
        back = up(edges, order(edges))
        print(f"{folder}: {len(edges)} arrows, {len(back)} of them up")
        if len(back) > most:
            bad += 1
            print(f"  more than {most}:", *(f"\n  {a} needs {b}" for a, b in back))
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
