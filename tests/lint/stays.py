#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""stays.py ROOT [-v]: a weight's way from the model's file to its plane is short. A stay is a call by which a weight
enters a function of another file (files as in circles.py): one that is given a pointer, to its bytes or to what describes
them. Calls of one function by another count once, and being called back counts as being called. The way begins in
load_tensor() and ends where the file is read and the plane is written. Errors, memory, text and threads are no part of it;
of each way, what other weights go through is left out. At most MOST stays: a number to lower, never to raise. -v lists
them."""
import re
import sys

from circles import STRING, definitions, name_of, read_all

MOST = 20
BEGIN, END = ("src/weights/weights", "load_tensor"), {"mt_pread_all", "mt_planes_write"}
HELPERS = {f"src/base/{name}" for name in ("err", "json", "log", "mem", "pool", "strbuf", "thread")}
DEFINED = re.compile(r"^(?!typedef|__)(?:static )?(?:inline )?\w[\w *]*?\b(\w+)\(([^;{}]*)\)\s*\{(.*?)^\}", re.M | re.S)
UNSEEN = re.compile(STRING.pattern + r"|MT_CLOSED_BY\(\w+\)")
POINTER = re.compile(r"(?!(?:const )?struct mt_err\b)[^,]*\*")

PLAIN = {"mt_stored_read_f32", "mt_stored_is_in_order"}
SHARE = {"load_share"}
AS_IT_IS = {"mt_packed_copy"}
DECODING = {"mt_packed_file_read", "mt_packed_matrix_values"}
PACKING = {"find_largest", "begin", "pack", "write_scales"}
RARE = {"round_24bit",      # masters of 24 bits
        "read_turned",      # GPTQ's and AWQ's order
        "mt_st_read_f32",   # scales in F16
        "mt_planes_read"}   # a packed tensor of planes
WAYS = {  # and what it does not go through
    "plain": AS_IT_IS | DECODING | PACKING | SHARE | RARE,
    "fused, or in another order": AS_IT_IS | DECODING | PACKING | RARE,
    "plain, and packed now": AS_IT_IS | DECODING | SHARE | RARE | {"find_largest", "mt_tensor_write_masters"},
    "packed": {"mt_tensor_fill", "read_piece", "find_largest"} | PLAIN | RARE,
    "packed, and decoded now": AS_IT_IS | PACKING | PLAIN | RARE,
}


def read_functions(files):
    """{(file, function): (parameters, body)}"""
    return {(name_of(path, files), name): (parameters, UNSEEN.sub(" ", body))
            for path, text in files.items() for name, parameters, body in DEFINED.findall(text)}


def steps(at, functions, where):
    """What a function calls or lets be called, in order, each once, and whether it is called back."""
    own, (parameters, body) = at[0], functions[at]
    for name, call in dict.fromkeys(re.findall(r"\b(\w+)\b(\()?", body)):
        to = (own, name) if (own, name) in functions or not call else (where.get(name), name)
        if to in functions and to != at and to[0] not in HELPERS and name not in re.findall(r"\w+", parameters):
            yield to, not call


def walk(at, left_out, functions, where, seen):
    """The stays from there on: (function, function)."""
    seen.add(at)
    for to, called_back in steps(at, functions, where):
        if to[1] in left_out:
            continue
        takes = any(POINTER.match(p.strip()) for p in functions[to][0].split(","))
        if takes and (called_back or to[0] != at[0]):
            yield at, to
        if to not in seen and to[1] not in END:
            yield from walk(to, left_out, functions, where, seen)


def main(root, verbose):
    files = {path: text for path, text in read_all(root).items() if path.startswith("src/")}
    functions, where, bad = read_functions(files), definitions(files), 0
    for way, left_out in WAYS.items():
        stays = list(walk(BEGIN, left_out, functions, where, set()))
        unknown = left_out - {name for _, name in functions}
        whole = END <= {to[1] for _, to in stays} and not unknown
        print(f"{way}: {len(stays)} stays (at most {MOST})", *(f"{name} is no function" for name in sorted(unknown)))
        if verbose or len(stays) > MOST or not whole:
            print(*(f"  {a[0]}:{a[1]} -> {b[0]}:{b[1]}" for a, b in stays), sep="\n")
        bad += len(stays) > MOST or not whole
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "-v" in sys.argv))
