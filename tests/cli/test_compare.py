# SPDX-License-Identifier: Apache-2.0
"""scripts/compare-builds: a build equals itself, and what another build does otherwise is reported."""
import os
import subprocess
import sys
import tempfile

BINARY = os.path.abspath(os.environ["MEGATRAIN"])
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FEW = ["family/qwen3-bf16-tied", "disk/f32-all", "resume/bf16-disk"]


def compare(new, names=FEW):
    """(exit status, name -> result)"""
    only = [x for n in names for x in ("--only", n)]
    p = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "compare-builds"), BINARY, new, *only],
                       capture_output=True, text=True)
    rows = {l.split()[0]: l for l in p.stdout.splitlines() if l.split()[0] in names}
    assert rows.keys() == set(names), p.stdout + p.stderr
    return p.returncode, rows


def other_build(tmp, name, script):
    """A stand-in for a build that does otherwise: the same program behind a script."""
    path = os.path.join(tmp, name)
    with open(path, "w") as f:
        f.write(f'#!/bin/sh\n{script}\nexec "{BINARY}" "$@"\n')
    os.chmod(path, 0o755)
    return path


def a_build_equals_itself(tmp):
    code, rows = compare(BINARY)
    assert code == 0 and all(r.endswith("equal") for r in rows.values()), rows


def a_small_change_of_numerics_is_reported(tmp):
    code, rows = compare(other_build(tmp, "eps", 'case " $* " in *" run "*) set -- "$@" --force --set optimizer.eps=1.1e-8 ;; esac'))
    assert code == 1 and all("DIFFERS" in r and "tensors" in r for r in rows.values()), rows


def a_change_that_only_a_resumed_run_sees_is_reported(tmp):
    code, rows = compare(other_build(tmp, "resume", 'case "$*" in *--resume*) set -- "$@" --force --set train.min_lr_ratio=0.11 ;; esac'))
    assert code == 1 and [n for n, r in rows.items() if "DIFFERS" in r] == ["resume/bf16-disk"], rows


def a_build_that_fails_is_reported_with_its_message(tmp):
    code, rows = compare(other_build(tmp, "fails", 'case "$*" in *export*) echo "the disk is full" >&2; exit 5 ;; esac'), FEW[:1])
    assert code == 1 and "NEW: export: exit 5: the disk is full" in rows[FEW[0]], rows


with tempfile.TemporaryDirectory() as tmp:
    for test in (a_build_equals_itself, a_small_change_of_numerics_is_reported,
                 a_change_that_only_a_resumed_run_sees_is_reported,
                 a_build_that_fails_is_reported_with_its_message):
        test(tmp)
        print(f"ok {test.__name__}", flush=True)
