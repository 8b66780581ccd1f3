# SPDX-License-Identifier: Apache-2.0
"""Stored models with their weights in FP32."""
import os

from seeded import read_safetensors, write_safetensors


def widen(source, out):
    """The model with its weights in FP32."""
    os.makedirs(out)
    with open(os.path.join(source, "config.json")) as f:
        text = f.read()
    with open(os.path.join(out, "config.json"), "w") as f:
        f.write(text.replace("bfloat16", "float32"))
    wide = {}
    for name, (dtype, shape, raw) in read_safetensors(os.path.join(source, "model.safetensors")).items():
        assert dtype == "BF16"
        wide[name] = "F32", shape, b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
    write_safetensors(os.path.join(out, "model.safetensors"), wide)
    return out
