#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Is the GPU right? Trains 20 steps of a configuration in bf16 on the GPU and on the cpu device, and prints the losses of both
and their largest difference. Exit code 1: it is over 1%. gpu_beside_cpu.py MEGATRAIN CONFIG OUT_DIR"""
import json
import os
import subprocess
import sys

STEPS, MOST = 20, 0.01


def losses(program, config, out, kind):
    subprocess.run([program, "-q", "run", config, "--force", "--no-save", "--out", out, "--max-steps", str(STEPS), "--set",
                    "model.dtype=bf16", "--set", "device.kind=" + kind], check=True)
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [m["loss"] for m in map(json.loads, f) if "loss" in m]


def main(program, config, out):
    gpu, cpu = (losses(program, config, os.path.join(out, kind), kind) for kind in ("cuda", "cpu"))
    print("step       GPU       cpu")
    for step, (a, b) in enumerate(zip(gpu, cpu), 1):
        print(f"{step:4} {a:9.5f} {b:9.5f}")
    worst = max(abs(a / b - 1) for a, b in zip(gpu, cpu))
    good = len(gpu) == len(cpu) == STEPS and worst <= MOST
    print(f"largest difference of a loss: {worst:.4%}" + ("" if good else f", which is too much for {STEPS} steps: please report it"))
    return not good


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except subprocess.CalledProcessError as e:
        sys.exit(f"gpu_beside_cpu: {e}")
