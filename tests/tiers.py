#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which tests a run of scripts/test has, from Meson's own list of tests (tests/README.md, "Tiers").
  tiers.py targets BUILD WORD...   what ninja has to build: @CHOICE is what the tests of a choice need, others are as they are
  tiers.py CHOICE BUILD            names of the tests of a choice
  tiers.py --all CHOICE BUILD      in whichever landing they run
A choice is `first`, the first tier; `rest`, those of the plain build that CI runs after it; `sanitized`, those that CI runs under
AddressSanitizer; `threads`, those that it runs under ThreadSanitizer; `every`, all of a build.
Of all but the first tier CI runs a third, another third with the next commit, and those whose own sources changed lately."""
import collections
import json
import os
import re
import subprocess
import sys
import zlib

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
EVERY_TURN = sys.argv[1:2] == ["--all"]
TURNS = 1 if EVERY_TURN else 3  # a test runs in one of so many landings
RECENT = 30  # commits: what one landing brings, with some to spare; a test runs if its sources changed in these


def introspected(build, what):
    with open(os.path.join(build, "meson-info", f"intro-{what}.json")) as f:
        return json.load(f)


def suites(test):
    return {s.rpartition(":")[2] for s in test["suite"]}


def targets(build, tests):
    """Paths in the build's folder of what the tests depend on."""
    files = {t["id"]: t["filename"] for t in introspected(build, "targets")}
    ids = {i for t in tests for i in t["depends"]}
    return sorted({os.path.relpath(f, os.path.realpath(build)) for i in ids for f in files.get(i, [])})


def modules_of(script):
    """The files beside a script that it imports."""
    with open(os.path.join(ROOT, script)) as f:
        names = re.findall(r"^(?:import|from) (\w+)", f.read(), re.M)
    paths = (os.path.join(os.path.dirname(script), name + ".py") for name in names)
    return {p for p in paths if os.path.isfile(os.path.join(ROOT, p))}


def sources(build):
    """test -> the sources that are its own: the script and what no other script imports, or the files of its program that
    are in tests/."""
    made = {os.path.realpath(f): [s for group in t["target_sources"] for s in group.get("sources", [])]
            for t in introspected(build, "targets") for f in t["filename"]}

    def own(test):
        for word in test["cmd"]:
            path = os.path.realpath(os.path.join(build, word))
            for source in made.get(path, [path]):
                source = os.path.relpath(os.path.realpath(source), ROOT)
                if source.startswith(("tests/", "scripts/")) and os.path.isfile(os.path.join(ROOT, source)):
                    yield source

    found = {t["name"]: set(own(t)) for t in introspected(build, "tests")}
    scripts = {s for some in found.values() for s in some if s.endswith(".py")}
    imports = {s: modules_of(s) for s in scripts}
    users = collections.Counter(m for modules in imports.values() for m in modules)
    return {name: some | {m for s in some for m in imports.get(s, ()) if users[m] == 1} for name, some in found.items()}


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=True).stdout


def recent_changes():
    """Files that the last commits changed."""
    return set(git("diff", "--name-only", f"HEAD~{RECENT}").splitlines())


def in_turn(build, tests):
    """Those of the tests whose turn it is, by the number of commits, and those whose own sources changed. All where
    there is no history to tell."""
    try:
        number, changed = int(git("rev-list", "--count", "HEAD")), recent_changes()
    except (OSError, subprocess.CalledProcessError):
        return tests
    own = sources(build)
    return [t for t in tests
            if (zlib.crc32(t["name"].encode()) + number) % TURNS == 0 or own[t["name"]] & changed]


def beyond_first(build):
    return [t for t in introspected(build, "tests") if not suites(t) & {"first", "night"}]


def first(build):
    return [t for t in introspected(build, "tests") if "first" in suites(t)]


def rest(build):
    return in_turn(build, beyond_first(build))


def sanitized(build):
    return in_turn(build, [t for t in introspected(build, "tests") if not suites(t) & {"once", "night"}])


def threads(build):
    return in_turn(build, [t for t in introspected(build, "tests") if "threads" in suites(t)])


def every(build):
    return introspected(build, "tests")


CHOICES = {"first": first, "rest": rest, "sanitized": sanitized, "threads": threads, "every": every}


def main(command, build, *words):
    if command == "targets":
        found = [f for w in words for f in (targets(build, CHOICES[w[1:]](build)) if w.startswith("@") else [w])]
    else:
        found = [t["name"] for t in CHOICES[command](build)]
    print("\n".join(found))


if __name__ == "__main__":
    main(*sys.argv[1 + EVERY_TURN:])
