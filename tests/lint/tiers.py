#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tiers.py ROOT BUILD: every kind of promise has a test in the first tier: each folder of tests/unit, which mirrors one
of src, each file of tests/cli and tests/parity, and the other folders of tests."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import tiers  # noqa: E402

# No tests; of what nvcc makes, which the first tier does without; whole builds anew.
WITHOUT = {"tests/bench", "tests/cuda", "tests/cuda_ptx", "tests/toys", "tests/cli/test_dist.py", "tests/cli/test_package.py"}


def kind_of(source):
    folder = os.path.dirname(source)
    return source if folder in ("tests/cli", "tests/parity") and source.endswith(".py") else folder


def main(root, build):
    files, kinds = tiers.sources(build), {}
    for test in tiers.introspected(build, "tests"):
        for kind in {kind_of(s) for s in files[test["name"]] if s.startswith("tests/")} - WITHOUT:
            kinds.setdefault(kind, []).append(tiers.suites(test))
    bad = [f"{kind}: none of its {len(tests)} tests is in the suite `first` (tests/README.md, Tiers)" for kind, tests in sorted(kinds.items())
           if not any("first" in t for t in tests)]
    bad += [f"tests/unit/{f}: no test" for f in sorted(os.listdir(os.path.join(root, "tests", "unit")))
            if os.path.isdir(os.path.join(root, "tests", "unit", f)) and f"tests/unit/{f}" not in kinds]
    print("\n".join(bad + [f"{len(kinds)} kinds of tests, {len(bad)} without one in the first tier"]))
    return bool(bad) or not kinds


sys.exit(main(*sys.argv[1:]))
