# SPDX-License-Identifier: Apache-2.0
"""Experts on side streams (device.expert_streams) of an emulated GPU: the bits of one after the other, for every number of
streams, whatever the delays; with what each stream needs for itself: gradients, decoded weights, adapters' products, biases'
workspaces, operands in FP8."""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, losses, megatrain, planes, write_data, write_ini, write_model

WIDE = {"num_hidden_layers": 1, "num_experts": 8, "moe_intermediate_size": 32}
FULL = "MEGATRAIN_TEST_FULL" in os.environ
#: of each case: the model, changes of the configuration, numbers of streams
CASES = {
    "everything": (config("qwen3_moe", **WIDE), {"memory__expert_group": 5, "memory__expert_sums": 3}, (2, 3, 4) if FULL else (3,)),
    "codes": (config("gpt_oss", num_hidden_layers=1), {"model__base_dtype": "mxfp4", "adapter__kind": "lora", "adapter__rank": 4,
                                                       "adapter__targets": "*.experts.*"}, (3,)),
    "fp8": (config("qwen3_moe", **WIDE), {"model__dtype": "bf16", "model__compute": "fp8", "train__micro_batch": 1,
                                          "train__groups": 2}, (3,)),
}
if FULL:
    CASES["biases"] = config("gpt_oss", num_hidden_layers=2), {}, (3,)
    CASES["adapters"] = config("qwen3_moe", **WIDE), {"adapter__kind": "lora", "adapter__targets": "*.experts.*"}, (2, 3)
    CASES["together"] = config("qwen3_moe", **WIDE), {"adapter__kind": "dora"}, (3,)


def run(tmp, name, model, data, over, streams, jitter):
    out = os.path.join(tmp, f"{name}-{streams}")
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=1, train__batch_size=2, device__expert_streams=streams,
                                       memory__device_budget="256MiB", **over))
    megatrain("-q", "run", ini, env={"MEGATRAIN_POISON": "1", "MT_EMU_JITTER_US": str(jitter), "MT_EMU_SEED": str(streams)})
    return losses(out), planes(os.path.join(out, "checkpoint-1"))


with tempfile.TemporaryDirectory() as tmp:
    data = write_data(os.path.join(tmp, "data.jsonl"))
    for name in sys.argv[1:] or CASES:
        cfg, over, numbers = CASES[name]
        model = write_model(os.path.join(tmp, "model-" + name), cfg)
        want = run(tmp, name, model, data, over, 1, 0)
        assert len(want[0]) == 1, name
        for n in numbers:
            assert run(tmp, name, model, data, over, n, 300) == want, f"{name}: device.expert_streams = {n} moves bits"
