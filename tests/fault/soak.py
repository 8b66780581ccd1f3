# SPDX-License-Identifier: Apache-2.0
"""
A long run from a drive that breaks again and again: transfers fail, are short, come late or come back changed, and the
process is killed. It is resumed each time. In the end it must be, bit for bit, the run that nothing happened to.

  scripts/soak [SECONDS]      an hour; MEGATRAIN_TEST_SEED chooses the faults
"""
import os
import random
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import BINARY, base, config, losses, megatrain, planes, write_data, write_ini, write_model  # noqa: E402

SEED = int(os.environ.get("MEGATRAIN_TEST_SEED", "1"))
PIECES = {"MEGATRAIN_DISK_PIECE": "2048"}
STEPS_A_LEG = 40


def fault(r):
    kind = r.choice(("eio", "enospc", "zero", "short", "eintr", "eagain", "flip", "stale", "swap", "drop"))
    return f"{r.choice(('read', 'write', 'any'))}:{kind}:{r.randrange(1, 30000)}:{r.choice((1, 1, 2, 3))}"


def leg(r, ini, steps, counts):
    """One run until `steps`, or until it breaks or is killed."""
    how = r.choice(("fault", "fault", "kill", "none"))
    env = {**os.environ, **PIECES, **({"MEGATRAIN_IO_FAULT": fault(r)} if how == "fault" else {})}
    run = subprocess.Popen([BINARY, "-q", "run", ini, "--resume", "--set", f"train.steps={steps}"], env=env,
                           stderr=subprocess.PIPE, text=True)
    try:
        said = run.communicate(timeout=r.random() * 3 if how == "kill" else 600)[1]
    except subprocess.TimeoutExpired:
        assert how == "kill", f"a run with {env.get('MEGATRAIN_IO_FAULT')} does not end"
        run.kill()
        said = run.communicate()[1]
    code = run.returncode
    assert code in (0, 1, 4, -9), (env.get("MEGATRAIN_IO_FAULT"), code, said)
    counts[how, code] = counts.get((how, code), 0) + 1
    return code == 0


def main(seconds):
    r, counts, end = random.Random(SEED), {}, time.time() + seconds
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as tmp:
        drive = os.path.join(tmp, "drive")
        os.makedirs(drive)
        model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=3))
        data = write_data(os.path.join(tmp, "data.jsonl"))
        ini = lambda name, **over: write_ini(os.path.join(tmp, name + ".ini"), base(
            model, data, os.path.join(tmp, name), train__steps=1, train__schedule="constant", train__warmup=0,
            data__eval="", checkpoint__every=7, checkpoint__keep=2, memory__nvme_paths=drive, **over))
        broken, whole = ini("broken", memory__states="disk", memory__activations="disk"), ini("whole")
        steps = 0
        while time.time() < end:
            steps += STEPS_A_LEG
            while not leg(r, broken, steps, counts):
                pass
            megatrain("-q", "run", whole, "--resume", "--set", f"train.steps={steps}")
            a, b = (os.path.join(tmp, n) for n in ("broken", "whole"))
            assert planes(f"{a}/checkpoint-{steps}") == planes(f"{b}/checkpoint-{steps}"), f"step {steps}: other bits"
            assert losses(a) == losses(b), f"step {steps}: other losses"
            assert not os.listdir(drive), "scratch is left"
    print(f"ok {seconds} s: {steps} steps;", ", ".join(f"{h} {c}: {n}" for (h, c), n in sorted(counts.items())))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3600)
