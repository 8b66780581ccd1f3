#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""environment.py ROOT: `megatrain help environment` and the manual have each environment variable that the program
reads, and no other: the table in cli/help_cmd.c against every getenv() of src, cuda and cli."""
import os
import re
import sys


def main(root):
    used = {}
    for top in ("src", "cuda", "cli"):
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in names:
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    for variable in re.findall(r'\bgetenv\("(\w+)"\)', f.read()):
                        used.setdefault(variable, os.path.relpath(os.path.join(folder, name), root))
    with open(os.path.join(root, "cli", "help_cmd.c"), encoding="utf-8") as f:
        table = f.read().split("user_variables[] = {")[1].split("\n};")[0]
    documented = set(re.findall(r'^    \{"(\w+)", "', table, re.M))
    bad = [f"{path} reads {v}, which cli/help_cmd.c does not document" for v, path in used.items() if v not in documented]
    bad += [f"cli/help_cmd.c documents {v}, which nothing reads" for v in sorted(documented - set(used))]
    print("\n".join(bad + [f"{len(used)} variables, {len(bad)} faults"]))
    return bool(bad) or not used


sys.exit(main(sys.argv[1]))
