# SPDX-License-Identifier: Apache-2.0
"""Each fault that seeded-cuda commits is reported, and what it does rightly is not.

test_faults.py SEEDED SANITIZERS: those it was built with, as Meson names them ("address,undefined", "none").
"""
import os
import subprocess
import sys

seeded, sanitizers = sys.argv[1:]
failures = []


def run(fault, **env):
    e = {**os.environ, **env, "UBSAN_OPTIONS": "halt_on_error=1"}
    p = subprocess.run([seeded, fault], capture_output=True, text=True, env=e)
    return p.returncode, p.stdout, p.stderr


def expect(fault, *words, **env):
    rc, _, err = run(fault, **env)
    if rc == 0 or not all(w in err for w in words):
        failures.append(f"{fault}: exit {rc}, expected a report with {words}:\n{err[-2000:]}")


for seed in "0", "1", "2":
    rc, _, err = run("clean", MT_EMU_SEED=seed, MT_EMU_JITTER_US="300")
    if rc:
        failures.append(f"clean, seed {seed}: exit {rc}\n{err[-2000:]}")

kernel = "block (0, 0, 0)"
expect("barrier", "divergent barrier", "two_barriers", kernel, "seeded.cpp")
expect("early-exit", "divergent barrier", "leave_early", kernel, "has left the kernel")
expect("lane", "does not arrive", "sum_lanes", "thread (31, 0, 0)")
expect("own-mask", "not in its own mask", "sum_lanes")
expect("no-lane", "a lane that the block does not have", "sum_lanes")
expect("host-pointer", "kernel fill", "argument 0", "host memory", "cudaErrorIllegalAddress")
expect("pinned-pointer", "kernel fill_struct", "pinned host memory", "cudaErrorIllegalAddress")
expect("missed-copy", "device memory, where host memory belongs", "cudaErrorInvalidValue")
expect("long-copy", "1025 bytes", "1024 are left", "cudaErrorInvalidValue")
expect("freed", "kernel fill", "not allocated")
if "ospke" in open("/proc/cpuinfo").read():
    expect("host-reads-device", "host code touches device memory")
if "address" in sanitizers:
    expect("overrun", "use-after-poison", "fill")
    expect("shared-overrun", "use-after-poison", "turn_dynamic")
if "undefined" in sanitizers:
    expect("static-shared-overrun", "out of bounds", "float [256]")
if "thread" in sanitizers:
    expect("race", "data race", "turn")
    # Delays make it likely that the streams overlap; where they do not, their order hides the race.
    seen = (run("stream-race", MT_EMU_SEED=str(s), MT_EMU_JITTER_US="2000")[2] for s in range(1, 6))
    if not any("data race" in err and "add_one" in err for err in seen):
        failures.append("a missing event wait was no data race in any of five orders")
else:  # what a result should not depend on differs by seed
    if run("stream-race", MT_EMU_SEED="7", MT_EMU_JITTER_US="2000")[0] != 4:
        failures.append("a missing event wait did not show")
    if len({run("order", MT_EMU_SEED=str(s))[1] for s in range(8)}) < 2:
        failures.append("an order of threads that matters did not show")

for f in failures:
    print(f)
sys.exit(bool(failures))
