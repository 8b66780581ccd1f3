#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""parameters.py ROOT: functions of src, cli and cuda have at most 7 parameters; a struct holds more. MOST is the number
of functions that have more all the same: to lower, never to raise. Kernels take their arguments one by one: .cu files
are not counted."""
import os
import re
import sys

PARAMETERS, MOST = 7, 5
QUIET = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.S)  # comments and strings
FUNCTION = re.compile(r"^\w[\w *]*?\b(\w+)\(((?:[^(){};]|\([^(){};]*\))*)\)\s*\{", re.M)


def count(parameters):
    """Commas outside brackets, and one."""
    flat = re.sub(r"\([^()]*\)", "", parameters)
    return flat.count(",") + 1


def main(root):
    n, many = 0, []
    for top in ("src", "cli", "cuda"):
        for folder, _, names in sorted(os.walk(os.path.join(root, top))):
            for path in (os.path.join(folder, name) for name in sorted(names) if name.endswith((".c", ".cc", ".h"))):
                with open(path, encoding="utf-8") as f:
                    text = QUIET.sub(lambda m: "\n" * m.group().count("\n"), f.read())
                for m in FUNCTION.finditer(text):
                    n += 1
                    if count(m.group(2)) > PARAMETERS:
                        line = text[:m.start()].count("\n") + 1
                        many.append(f"{os.path.relpath(path, root)}:{line}: {m.group(1)}: {count(m.group(2))} parameters")
    print("\n".join(many + [f"{n} functions, {len(many)} with more than {PARAMETERS} parameters (at most {MOST})"]))
    return len(many) > MOST or not n


sys.exit(main(sys.argv[1]))
