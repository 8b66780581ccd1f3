# SPDX-License-Identifier: Apache-2.0
"""Several GPUs (device.gpus), emulated: the bits of one, whatever the delays and however host memory is locked, and the
ways to name them. The emulation refuses a kernel and a copy that are given another device's memory.

test_devices.py bits|names, with MEGATRAIN naming the emulated binary.
"""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, losses, megatrain, planes, write_data, write_ini, write_model

STEPS = 3
FOUR = {"MT_EMU_DEVICES": "4", "MEGATRAIN_POISON": "1"}
JITTER = {**FOUR, "MT_EMU_JITTER_US": "300"}
RECOMPUTE = {"memory__activations": "recompute"}
OFFLOAD = {"memory__activations": "offload"}
GROUPS = {"train__micro_batch": 1, "train__groups": 4, "device__map": "data"}
#: of each kind of model: device.gpus, environment, changes of the configuration
CASES = {
    "dense": [("2", FOUR, RECOMPUTE), ("3", JITTER, {"memory__activations": "keep"}), ("4", JITTER, OFFLOAD),
              ("all", {**JITTER, "MT_EMU_NO_PIN": "1", "MT_EMU_SEED": "5"}, RECOMPUTE),
              ("index:3,1", {**JITTER, "MT_EMU_PIN_LIMIT": "1M"}, OFFLOAD)],
    "mixture": [("3", JITTER, {"memory__expert_group": 3, "memory__slots": 2, **RECOMPUTE}),
                ("4", JITTER, {"memory__expert_group": 2, "train__router_aux_loss": 0.01, **RECOMPUTE, **GROUPS})],
    "adapters": [("4", JITTER, {"adapter__kind": "lora", "adapter__rank": 4, **RECOMPUTE})],
}


def make(tmp, kind):
    cfg = config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1]) if kind == "mixture" else \
        config("qwen3", tie_word_embeddings=kind == "adapters", num_hidden_layers=3)
    return write_model(os.path.join(tmp, "model-" + kind), cfg), write_data(os.path.join(tmp, "data.jsonl"))


def run(tmp, name, model, data, env, over, *args):
    out = os.path.join(tmp, name)
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=STEPS, train__batch_size=4, **over))
    megatrain("-q", "run", ini, *args, env=env)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def check_bits(tmp):
    for kind, cases in CASES.items():
        model, data = make(tmp, kind)
        want = {}
        for i, (gpus, env, over) in enumerate(cases):
            key = str(over)
            if key not in want:
                want[key] = run(tmp, f"{kind}-one-{i}", model, data, {**FOUR, "MT_EMU_DEVICES": "1"}, over)
                assert len(want[key][0]) == STEPS
            got = run(tmp, f"{kind}-{i}", model, data, env, {**over, "device__gpus": gpus})
            assert got == want[key], f"{kind}: device.gpus = {gpus} with {env} moved bits"


def uuid(index):
    return f"GPU-4d540000-0000-0000-0000-0000000000{index:02x}"


def check_names(tmp):
    model, data = make(tmp, "dense")
    out = os.path.join(tmp, "names")

    def said(gpus, expect, env=None, **over):
        ini = write_ini(out + ".ini", base(model, data, out, device__gpus=gpus, **over))
        return megatrain("run", "--dry-run", ini, expect=expect, env={**FOUR, **(env or {})}).stderr

    for gpus in ("4", "all", "index:2,0", uuid(3), f"{uuid(1)},{uuid(0)}"):
        text = said(gpus, 0)
        first = {"index:2,0": 2, uuid(3): 3, f"{uuid(1)},{uuid(0)}": 1}.get(gpus, 0)
        assert f"cuda {first} " in text, (gpus, text)
        assert f"0000:{first:02x}:00.0, {uuid(first)}" in text, (gpus, text)
        assert text.count(":00.0, GPU-") == {"4": 4, "all": 4, uuid(3): 1}.get(gpus, 2), text
    assert "cuda 1 " in said("all", 0, device__index=1)
    for gpus, words in (("5", ("GPU 4", "4 were found")), ("index:0,9", ("GPU 9",)), ("index:1,1", ("twice",)),
                        ("index:", ("device.gpus",)), ("0", ("1 to 8",)), ("9", ("1 to 8",)), ("2,3", ("nvidia-smi -L",)),
                        ("two", ("device.gpus", "all")), ("GPU-4d54", ("more than one",)), ("GPU-77", ("no GPU",)),
                        (f"{uuid(1)},2", ("device.gpus",))):
        code = 5 if gpus in ("5", "index:0,9") else 2
        text = said(gpus, code)
        assert all(w in text for w in words), (gpus, text)
    text = said("2", 2, {"MT_EMU_NAME": "card A;card B"})
    assert "card A" in text and "card B" in text and "one product" in text, text
    text = said("index:0,1", 2, device__kind="cpu")
    assert "the cpu device" in text and "device.gpus" in text, text


with tempfile.TemporaryDirectory() as tmp:
    {"bits": check_bits, "names": check_names}[sys.argv[1]](tmp)
