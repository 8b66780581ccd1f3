#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program built with CUDA runs where no GPU can be seen: doctor says why there is none, auto takes the
cpu device, and device.kind = cuda ends with the device's exit code and the reason."""
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, losses, megatrain, write_data, write_ini, write_model

BLIND = {"CUDA_VISIBLE_DEVICES": ""}

line = next(l for l in megatrain("doctor", env=BLIND).stdout.splitlines() if l.startswith("device cuda"))
assert "no GPU can be used" in line, line

with tempfile.TemporaryDirectory() as tmp:
    model = write_model(os.path.join(tmp, "model"), config(num_hidden_layers=1))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    for kind, code in (("auto", 0), ("cuda", 5)):
        out = os.path.join(tmp, kind)
        ini = write_ini(os.path.join(tmp, kind + ".ini"),
                        base(model, data, out, device__kind=kind, train__steps=1))
        done = megatrain("run", ini, env=BLIND, expect=code)
        assert kind == "auto" or "no GPU can be used" in done.stderr, done.stderr
        assert code or len(losses(out)) == 1
