# SPDX-License-Identifier: Apache-2.0
"""Stored models with their weights in FP32."""
import json
import os
import struct

from tiny import read_safetensors


def widen(source, out):
    """The model with its weights in FP32."""
    os.makedirs(out)
    with open(os.path.join(source, "config.json")) as f:
        text = f.read()
    with open(os.path.join(out, "config.json"), "w") as f:
        f.write(text.replace("bfloat16", "float32"))
    header, data = {}, b""
    for name, (dtype, shape, raw) in read_safetensors(os.path.join(source, "model.safetensors")).items():
        assert dtype == "BF16"
        wide = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(wide)]}
        data += wide
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(out, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    return out
