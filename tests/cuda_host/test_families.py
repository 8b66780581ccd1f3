# SPDX-License-Identifier: Apache-2.0
"""Models of tests/parity on the emulated CUDA device: close to the cpu device, the same bits in another order of threads and
blocks.

test_families.py FAMILY:f32|bf16[:CHUNK] ..., with MEGATRAIN naming the emulated binary; CHUNK: train.chunk there.
"""
import os
import shutil
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PARITY = os.path.join(HERE, "..", "parity")
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
from tiny import base, fixture, losses, megatrain, planes, write_ini

STEPS = int(os.environ.get("MEGATRAIN_TEST_STEPS", "3"))
TOLERANCE = {"f32": 2e-6, "bf16": 2e-3}  # of losses, relative; the norm of the gradient ten times that


def run(tmp, name, family, kind, dtype, env=None, **over):
    out = os.path.join(tmp, f"{family}-{dtype}-{name}")
    ini = write_ini(out + ".ini", base(fixture(family), os.path.join(tmp, "data.jsonl"), out,
        device__kind=kind, model__init="weights", model__dtype=dtype, data__eval="", train__steps=STEPS,
        train__batch_size=4, **over))
    megatrain("-q", "run", ini, env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def close(what, got, want, tolerance):
    assert len(got) == len(want) == STEPS
    for (step, loss, norm), (_, loss0, norm0) in zip(got, want):
        assert abs(loss / loss0 - 1) <= tolerance, f"{what}, step {step}: loss {loss}, {loss0}"
        assert abs(norm / norm0 - 1) <= 10 * tolerance, f"{what}, step {step}: norm {norm}, {norm0}"


def check(tmp, family, dtype, chunk=None):
    cpu, _ = run(tmp, "cpu", family, "cpu", dtype, train__micro_batch=2)
    cut = {"train__micro_batch": 1, "train__chunk": chunk} if chunk else {"train__micro_batch": 2}
    want = run(tmp, "cuda", family, "cuda", dtype, **cut)
    close(f"{family} {dtype}, beside the cpu device", want[0], cpu, TOLERANCE[dtype])
    got = run(tmp, "order", family, "cuda", dtype, env={"MT_EMU_SEED": "3", "MT_EMU_WORKERS": "1"}, **cut)
    assert got == want, f"{family} {dtype}: another order of blocks gives other bits"


with tempfile.TemporaryDirectory() as tmp:
    shutil.copy(os.path.join(PARITY, "data.jsonl"), tmp)
    for case in sys.argv[1:]:
        check(tmp, *case.split(":"))
