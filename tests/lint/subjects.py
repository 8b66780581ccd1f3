#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""subjects.py ROOT: the subjects of commits are `area: what changes`, in at most 72 characters. Those before the one that brought
this file are as they are; without history, as in a source archive, there is nothing to look at."""
import re
import subprocess
import sys

COLUMNS = 72


def git(root, *args):
    said = subprocess.run(["git", "-C", root, *args], capture_output=True, text=True)
    return "" if said.returncode else said.stdout


def main(root):
    brought = git(root, "log", "--diff-filter=A", "--format=%H", "--", "tests/lint/subjects.py").split()
    commits = git(root, "log", "--no-merges", "--format=%h %s", f"{brought[-1]}..HEAD").splitlines() if brought else []
    bad = []
    for line in commits:
        commit, _, subject = line.partition(" ")
        if len(subject) > COLUMNS:
            bad.append(f"{commit}: {len(subject)} characters, more than {COLUMNS}: {subject}")
        elif not re.match(r'Revert "|[\w.][\w., /-]*: \S', subject):
            bad.append(f"{commit}: not of the form 'area: what changes': {subject}")
    print("\n".join(bad + [f"{len(commits)} commits, {len(bad)} faults"]))
    return bool(bad)


sys.exit(main(sys.argv[1]))
