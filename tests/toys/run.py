#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many places must be edited to add something: run.py ROOT PATCH...

Each patch adds a toy of one kind (an operation, a family of models, an optimizer, a key) to the sources, as somebody
would add a real one. Before its first "diff --git" a patch has prose and lines of these kinds:

  Places: N          files that it may make or edit at most; meson.build, tests/ and *.md do not count
  Build: TARGET...   ninja targets to build
  Run: COMMAND [=> TEXT]   run in the build folder: must exit with 0, and TEXT must be in what it prints
  Run full: COMMAND [=> TEXT]   the same with MEGATRAIN_TEST_FULL=1 alone, for which Build full: has the targets

All patches are applied to one copy of ROOT's tracked files in a temporary folder, which is built without optimisation,
once. With MEGATRAIN_TEST_FULL=1 all of it is built, and the unit and device suites must pass with the toys in it."""
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

OPTIONS = ["-Dcuda=disabled", "-Doptimization=0", "-Ddebug=false"] # warnings that need no optimisation are not all true


class Toy:
    def __init__(self, path):
        self.path, self.name = os.path.abspath(path), os.path.basename(path)
        with open(path, encoding="utf-8") as f:
            head, _, self.diff = f.read().partition("\ndiff --git ")
        some = "( full)?" if os.environ.get("MEGATRAIN_TEST_FULL") else "()"
        self.build = " ".join(names for _, names in re.findall(rf"^Build{some}: (.*)$", head, re.M)).split()
        self.runs = [run.partition(" => ")[::2] for _, run in re.findall(rf"^Run{some}: (.*)$", head, re.M)]
        promised = re.findall(r"^Places: (\d+)$", head, re.M)
        if len(promised) != 1 or not self.build or not self.runs or not self.diff:
            sys.exit(f"{self.name}: wants one line Places:, lines Build: and Run:, and a diff")
        self.promised = int(promised[0])

    def places(self):
        """Files that the patch touches and that count."""
        files = re.findall(r"^(?:diff --git )?a/(\S+) b/(\S+)$", self.diff, re.M)
        return sorted({new for _, new in files
                       if not new.startswith("tests/") and not new.endswith((".md", "meson.build"))})


def run(cmd, cwd, env=None, keep=False):
    p = subprocess.run(cmd, cwd=cwd, env={**os.environ, **(env or {})}, text=True, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT)
    if p.returncode and not keep:
        sys.exit(f"{shlex.join(cmd)}: exit {p.returncode}\n{p.stdout[-6000:]}")
    return p.returncode, p.stdout


def sources(root):
    """The files that git tracks, or would; of an unpacked archive all, but no build's."""
    if os.path.exists(os.path.join(root, ".git")):
        _, names = run(["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"], root)
        return list(filter(None, names.split("\0")))
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if not os.path.exists(os.path.join(folder, name, "build.ninja"))]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in files]
    return names


def copy(root, tree):
    for name in sources(root):
        source, target = os.path.join(root, name), os.path.join(tree, name)
        if os.path.isfile(source): # tracked, and perhaps deleted
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(source, target)


def main(root, patches):
    toys = [Toy(p) for p in patches]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="megatrain-toys-") as tree:
        copy(root, tree)
        for toy in toys:
            places = toy.places()
            print(f"{toy.name}: {len(places)} places of {toy.promised}: {' '.join(places)}")
            failed += len(places) > toy.promised
            # a patch is nothing to git where the folder is in a repository that ignores it
            run(["git", "apply", "-C1", toy.path], tree, {"GIT_CEILING_DIRECTORIES": os.path.dirname(tree)})
        build = os.path.join(tree, "build")
        run(["meson", "setup", build, tree, *OPTIONS], tree)
        full = os.environ.get("MEGATRAIN_TEST_FULL")
        run(["ninja", "-C", build, *([] if full else sorted({t for toy in toys for t in toy.build}))], tree)
        for toy in toys:
            for command, text in toy.runs:
                rc, out = run(["sh", "-c", command], build, keep=True)
                good = rc == 0 and text in out
                failed += not good
                print(f"{toy.name}: {command}: {'OK' if good else f'exit {rc}, FAILED' + chr(10) + out[-3000:]}")
        if full:
            print(run(["meson", "test", "-C", build, "--no-rebuild", "--suite", "unit", "--suite", "device"], tree)[1])
    return failed != 0 or not toys


sys.exit(main(os.path.abspath(sys.argv[1]), sys.argv[2:]))
