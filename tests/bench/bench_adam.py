# SPDX-License-Identifier: Apache-2.0
"""AdamW (bf16 gradient, split FP32 master) against the rate of a plain copy, measured in the same run."""
import json
import os
import statistics
import subprocess

BINARY = os.environ["MEGATRAIN"]
BYTES = 26  # a parameter: hi, lo, m and v read and written, the gradient read
TARGET = 1.3

print(f"load average {os.getloadavg()[0]:.2f}")
ratios = []
for _ in range(5):
    p = subprocess.run([BINARY, "probe", "adam", "--json"], capture_output=True, text=True, check=True)
    line = json.loads(p.stdout)
    copy, adam = line["copy GB/s (read + written)"], line["adam ns a parameter"]
    ratios.append(adam / (BYTES / copy))
    print(f"copy {copy:6.2f} GB/s  adam {adam:6.3f} ns a parameter = {BYTES / adam:6.2f} GB/s  over the copy's bound {ratios[-1]:.3f}")
print(f"median of five: {statistics.median(ratios):.3f}   target <= {TARGET}")
