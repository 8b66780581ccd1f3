# SPDX-License-Identifier: Apache-2.0
"""Training on the emulated CUDA device: close to the cpu device, and the same bits whatever the order of
threads, blocks and copies, and whether host memory can be pinned.

test_training.py f32|bf16, with MEGATRAIN naming the emulated binary.
"""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, losses, megatrain, planes, write_data, write_ini, write_model

STEPS = int(os.environ.get("MEGATRAIN_TEST_STEPS", "4"))
# Losses over the steps, relative; the norm of the gradient ten times that. Sums have other orders, so bf16
# roundings fall otherwise now and then.
TOLERANCE = {"f32": 1e-6, "bf16": 1e-3}
ORDERS = {
    "in order": {"MT_EMU_SEED": "0"},
    "another seed": {"MT_EMU_SEED": "2"},
    "one worker": {"MT_EMU_SEED": "3", "MT_EMU_WORKERS": "1"},
    "delays": {"MT_EMU_SEED": "4", "MT_EMU_JITTER_US": "300"},
    "nothing pinned": {"MT_EMU_NO_PIN": "1", "MT_EMU_JITTER_US": "100"},
    "half pinned": {"MT_EMU_PIN_LIMIT": "1M"},
}


def run(tmp, name, kind, dtype, model, data, env=None, **over):
    out = os.path.join(tmp, name.replace(" ", "-"))
    ini = write_ini(out + ".ini", base(model, data, out, device__kind=kind, model__dtype=dtype,
                                       train__steps=STEPS, train__batch_size=4, **over))
    megatrain("-q", "run", ini, env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def check(tmp, dtype, tied):
    model = write_model(os.path.join(tmp, "model"),
                        config("qwen3", tie_word_embeddings=tied, num_hidden_layers=3))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    cpu, _ = run(tmp, "cpu", "cpu", dtype, model, data)
    want = run(tmp, "cuda", "cuda", dtype, model, data)
    assert len(cpu) == len(want[0]) == STEPS
    tolerance = TOLERANCE[dtype]
    for (step, loss, norm), (_, loss_cpu, norm_cpu) in zip(want[0], cpu):
        assert abs(loss / loss_cpu - 1) <= tolerance, f"step {step}: loss {loss}, {loss_cpu} on the cpu device"
        assert abs(norm / norm_cpu - 1) <= 10 * tolerance, f"step {step}: norm {norm}, {norm_cpu}"
    for name, env in ORDERS.items():
        got = run(tmp, name, "cuda", dtype, model, data, env=env)
        assert got[0] == want[0], f"{name}: losses or norms differ: {got[0]} {want[0]}"
        assert got[1] == want[1], f"{name}: planes differ"


with tempfile.TemporaryDirectory() as tmp:
    check(tmp, sys.argv[1], sys.argv[1] == "bf16")
