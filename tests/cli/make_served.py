# SPDX-License-Identifier: Apache-2.0
"""Makes served.json: what transformers computes in f32 of the folders that export --quantize writes, their matrices decoded by
compressed-tensors, or by transformers for FP8.

MEGATRAIN=build/cli/megatrain make_served.py  (needs torch, transformers, compressed-tensors)
"""
import json
import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from test_packed import decode
from test_served import DECODED, FORMATS, HERE, IDS, export, write_source
from tiny import read_safetensors


def main():
    out, ids = {}, torch.tensor([IDS])
    with tempfile.TemporaryDirectory() as tmp:
        write_source(os.path.join(tmp, "source"))
        for form in FORMATS:
            folder, digest = export(tmp, form)
            decoded = FineGrainedFP8Config(dequantize=True) if form == "fp8" else CompressedTensorsConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=decoded)
            weights = model.state_dict()
            for name, (shape, values) in decode(read_safetensors(os.path.join(folder, "model.safetensors"))).items():
                want = torch.tensor(values).reshape(shape)
                want = want if form in DECODED else want.bfloat16().float()
                assert torch.equal(weights[name], want), f"{form}: {name} is not what our decoder makes of it"
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)[torch.arange(len(IDS) - 1), ids[0, 1:]]
            with open(os.path.join(folder, "config.json")) as f:
                described = json.load(f)["quantization_config"]
            out[form] = {"sha256": digest, "quantization_config": described, "logprobs": [round(x, 7) for x in logprobs.tolist()]}
    with open(os.path.join(HERE, "served.json"), "w") as f:
        f.write("{" + ",\n ".join(f'"{form}": {json.dumps(o)}' for form, o in out.items()) + "}\n")


main()
