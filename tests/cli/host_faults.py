# SPDX-License-Identifier: Apache-2.0
"""Cases of test_hosts.py: a fault of one of several hosts. All end and say why, and what they have saved is what one process has."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fault"))
from hosts import (KEYS, STEPS, compare, compare_with_one, endless, ini_of, inputs, mpirun, ranks_of, run_beside_hidden,
                   run_two, two_networks, wait_for_steps, within)
from test_faults import Small
from tiny import BINARY, FULL, base, losses, megatrain, patience, write_ini


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def lost_hosts_end_the_others(tmp):
    model, data = inputs(tmp)
    cases = {"stopped": (1, signal.SIGSTOP), "asked": (1, signal.SIGTERM), "killed": (2, signal.SIGKILL)}
    if FULL:
        cases.update({"first stopped": (0, signal.SIGSTOP), "first killed": (0, signal.SIGKILL)})
    deadline = round(patience(5))  # seconds; three hosts on two cores may take two of them for a step
    for name, (rank, sig) in cases.items():
        out, ini = endless(tmp, name.replace(" ", "-"), model, data, cluster__timeout=f"{deadline}s", checkpoint__every=3)
        p = mpirun(3, "run", ini, wait=False)
        wait_for_steps(out, 6, p)
        ranks = ranks_of(p)
        assert len(ranks) == 3, ranks
        os.kill(ranks[rank], sig)
        began = time.monotonic()
        text, _ = p.communicate()
        took = time.monotonic() - began
        assert took < patience(deadline + 15), f"{name}: ended after {took:.0f} s\n{text}"
        assert p.returncode, f"{name}: {text}"
        while any(is_alive(r) for r in ranks.values()): # the launcher may end before those that it has killed
            assert time.monotonic() - began < patience(deadline + 15), f"{name}: left behind"
            time.sleep(0.05)
        steps = compare_with_one(tmp, model, data, out)
        if name == "stopped":
            assert "host 1" in text and "lost, stopped or cut off" in text, text
        if name == "asked":
            assert "continue with --resume" in text, text
        print(f"{name}: {took:.1f} s, exit {p.returncode}, saved step {steps} of {len(losses(out))}")


def a_full_disk_of_one_host_keeps_what_is_saved(tmp):
    """Its drive has no room for states at the start, or in a step after a save; or the first's folder for checkpoints has none for the
    second one. All end, and say whose disk and which path; what is saved is whole, and another number of hosts goes on from there."""
    model, data = inputs(tmp)
    drive, copy = os.path.join(tmp, "drive"), os.path.join(tmp, "copy")
    os.mkdir(drive)
    over = {"memory__states": "disk", "memory__nvme_paths": drive, "checkpoint__every": 2, "checkpoint__save_deadline": "1s"}
    one, ini = ini_of(tmp, "one", model, data, **over)
    megatrain("run", ini)

    def goes_on(out, run, what):
        assert sorted(d for d in os.listdir(out) if d[11:].isdigit()) == ["checkpoint-2"] and not os.listdir(drive), what
        for step in 2, STEPS:
            compare(os.path.join(one, f"checkpoint-{step}"), os.path.join(out, f"checkpoint-{step}"), what)
            run("run", os.path.join(tmp, os.path.basename(out) + ".ini"), "--resume")
        assert losses(out) == losses(one), what
    _, ini = ini_of(tmp, "refused", model, data, **over, cluster__states="whole")
    p = run_beside_hidden(ini, f'-t tmpfs -o size=200k none "{drive}"')
    assert p is None or (p.returncode == 4 and f"host 1: it will not fit: " in p.stderr and drive in p.stderr), p
    full = ["env", "MEGATRAIN_IO_FAULT=write:enospc:450:60"]
    os.environ["MEGATRAIN_DISK_PIECE"] = "2048" # small ones, so that there are many writes
    for host, run in enumerate((lambda *a: mpirun(2, *a), megatrain)):
        out, ini = ini_of(tmp, f"full-{host}", model, data, **over)
        p = run_two(ini, **{("first", "second")[host]: full})
        said = [line for line in p.stderr.splitlines() if "No space left on device" in line and drive in line]
        assert p.returncode and any(f" host {host}: " in s for s in said), p
        assert any(f" host {1 - host}: " in s and f"host {host} has ended" in s for s in said), p
        goes_on(out, run, f"the drive of host {host}")
    with Small(tmp, "3600k") as small:
        if small:
            ini = write_ini(os.path.join(tmp, "fills.ini"), base(model, data, small, **KEYS, **over))
            p = run_two(ini)
            assert p.returncode == 4 and "host 0: step 4 was not saved" in p.stderr and small in p.stderr, p
            shutil.copytree(small, copy, ignore=lambda *_: ["checkpoint-4", "best", ".lock"]) # of its weights alone
            write_ini(copy + ".ini", base(model, data, copy, **KEYS, **over))
            goes_on(copy, lambda *a: mpirun(3, *a), "the folder of checkpoints")


def killed_at_random_points(tmp):
    """One of three hosts is killed or stopped anywhere in a step, perhaps while it updates, sends or saves. What they leave are
    checkpoints of one process, from which other numbers of hosts go on."""
    steps, drive = 14, os.path.join(tmp, "drive")
    model, data = inputs(tmp)
    os.mkdir(drive)
    one, ini = ini_of(tmp, "one", model, data, train__steps=steps, checkpoint__every=1)
    megatrain("-q", "run", ini)
    for seed in range(40):
        r = random.Random(seed)
        rank, hosts, every = r.randrange(3), r.choice([1, 2, 3]), r.choice([1, 2])
        out, ini = ini_of(tmp, f"killed-{seed}", model, data, train__steps=steps, checkpoint__every=every, **{
            "memory__states": r.choice(["host", "disk"]), "memory__activations": r.choice(["auto", "disk"]), "memory__nvme_paths": drive,
            "cluster__states": r.choice(["owned", "owned", "whole"]), "cluster__timeout": f"{round(patience(3))}s",
            "device__link_gbps": r.choice([0.02, 0.05])})
        p = mpirun(3, "run", ini, wait=False)
        wait_for_steps(out, max(r.randint(2, steps - 6), every + 1), p) # the first save has come to its end
        time.sleep(r.random() * 0.3)
        ranks, sig = ranks_of(p), r.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        os.kill(ranks[rank], sig)
        text, _ = p.communicate()
        while any(is_alive(pid) for pid in ranks.values()):
            time.sleep(0.05)
        what, saved = f"{seed}: host {rank}, {sig.name}", [d for d in os.listdir(out) if d[11:].isdigit()]
        assert p.returncode and saved, f"{what}: {text}"
        for d in saved:
            compare(os.path.join(one, d), os.path.join(out, d), what)
        (mpirun(hosts, "-q", "run", ini, "--resume") if hosts > 1 else megatrain("-q", "run", ini, "--resume"))
        compare(os.path.join(one, f"checkpoint-{steps}"), os.path.join(out, f"checkpoint-{steps}"), f"{what}, then {hosts} hosts")
        assert losses(out) == losses(one) and not os.listdir(drive), what
        print(f"{what}: {len(saved)} saved, then {hosts} hosts", flush=True)
        shutil.rmtree(out)


def runs(pid, program):
    try:
        return os.path.samefile(f"/proc/{pid}/exe", program)
    except OSError:
        return False


def a_cut_cable_ends_the_hosts(tmp):
    """The launcher's own end is not ours: mpirun of Open MPI waits for ever for a host that it cannot reach."""
    found = two_networks(tmp)
    if not found:
        print("no network namespaces, or no Open MPI")
        sys.exit(77)
    holders, second, launch = found
    model, data = inputs(tmp)
    deadline, text, p = round(patience(4)), os.path.join(tmp, "said"), None
    try:
        seen = json.loads(subprocess.run([*launch, "doctor", "--json"], check=True, capture_output=True).stdout)
        assert [h["name"] for h in seen["hosts"]] == ["node1", "node2"], seen
        assert not any("one machine" in f for f in seen["findings"]), seen
        out, ini = endless(tmp, "cut", model, data, cluster__timeout=f"{deadline}s", checkpoint__every=3)
        with open(text, "w") as f:
            p = subprocess.Popen([*launch, "run", ini], stdout=f, stderr=f)
        wait_for_steps(out, 6, p)
        ranks = [pid for pid in within(holders) if runs(pid, BINARY)]
        assert len(ranks) == 2, ranks
        subprocess.run([*second, "ip", "link", "set", "cable", "down"], check=True)
        began = time.monotonic()
        while any(is_alive(r) for r in ranks):
            assert time.monotonic() - began < patience(deadline + 15), open(text).read()
            time.sleep(0.05)
        assert "lost, stopped or cut off" in open(text).read(), open(text).read()
        compare_with_one(tmp, model, data, out)
    finally:
        for pid in within(holders): # mpirun, its daemon beyond the cable, and what holds the namespaces
            os.kill(pid, signal.SIGKILL)
