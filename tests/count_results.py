#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""count_results.py LOG ALLOWED: how many tests of a Meson test log passed, did not, and were skipped: three numbers.
A test may be skipped where the file ALLOWED names it. A log without a test counts as a failure."""
import json
import sys


def main(log, allowed):
    with open(allowed) as f:
        allowed = {line.split("#")[0].strip() for line in f} - {""}
    try:
        with open(log) as f:
            results = [json.loads(line) for line in f]
    except OSError as e:
        print(f"no test ran: {e}", file=sys.stderr)
        results = []
    passed = bad = skipped = 0
    for r in results:
        name = r["name"].split(" / ")[-1].split(":")[-1].strip()
        if r["result"] in ("OK", "EXPECTEDFAIL"):
            passed += 1
        elif r["result"] == "SKIP" and name in allowed:
            skipped += 1
        else:
            bad += 1
            print(f"not passed: {r['name']} ({r['result']})", file=sys.stderr)
    print(passed, bad + (not results), skipped)


main(*sys.argv[1:])
