# SPDX-License-Identifier: Apache-2.0
"""Several hosts, started by mpirun, as processes of one machine: what their tests share."""
import filecmp
import os
import subprocess
import time

from tiny import BINARY, base, config, megatrain, patience, write_data, write_ini, write_model

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))
STEPS = 4
MPIRUN = os.environ.get("MEGATRAIN_TEST_MPIRUN", "mpirun")
OPEN_MPI = "Open MPI" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
LAUNCH = [MPIRUN, *(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if OPEN_MPI else [])]
RANK = b"OMPI_COMM_WORLD_RANK" if OPEN_MPI else b"PMI_RANK"
KEYS = {"train__steps": STEPS, "train__batch_size": 7, "train__micro_batch": 1, "train__groups": 4, "device__cpu_threads": 1}


def mpirun(n, *args, expect=0, wait=True, env=None):
    p = subprocess.Popen([*LAUNCH, "-n", str(n), BINARY, *map(str, args)], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, env={**os.environ, "MEGATRAIN_POISON": "1", **(env or {})})
    if not wait:
        return p
    out, _ = p.communicate()
    assert p.returncode == expect, f"{n} hosts: exit {p.returncode}, expected {expect}\n{out}"
    return out


def run_two(ini, first=(), second=(), program=BINARY):
    """Two hosts, each behind words of its own; the second may have another program."""
    return subprocess.run([*LAUNCH, "-n", "1", *first, BINARY, "run", ini, ":", "-n", "1", *second, program, "run", ini], text=True,
                          capture_output=True, timeout=patience(100))


def run_beside_hidden(ini, mount):
    """Two hosts, the second of which sees what `mount` puts over a path; None: that is not allowed here."""
    hidden = ["unshare", "-m", "sh", "-c", f'mount {mount} && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True).returncode:
        return None
    return run_two(ini, second=hidden)


def inputs(tmp, **over):
    model = write_model(os.path.join(tmp, "model"), config("qwen2", num_hidden_layers=3, **over))
    return model, write_data(os.path.join(tmp, "data.jsonl"))


def ini_of(tmp, name, model, data, **over):
    out = os.path.join(tmp, name)
    return out, write_ini(os.path.join(tmp, f"{name}.ini"), base(model, data, out, **{**KEYS, **over}))


def compare(a, b, what):
    """Two checkpoints have the same files, but for what names the run and its machine."""
    names = sorted(os.listdir(a))
    assert names == sorted(os.listdir(b)), what
    tensors = [n for n in names if n.endswith((".safetensors", ".bin"))]
    assert tensors, names
    for n in tensors:
        assert filecmp.cmp(os.path.join(a, n), os.path.join(b, n), shallow=False), f"{what}: {n} differs"


def is_below(pid, top):
    while pid > 1 and pid != top:
        try:
            with open(f"/proc/{pid}/stat") as f:
                pid = int(f.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return pid == top


def ranks_of(launcher):
    """Process of each host, by its number."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{pid}/environ", "rb") as f:
                env = dict(e.split(b"=", 1) for e in f.read().split(b"\0") if b"=" in e)
        except (OSError, ProcessLookupError):
            continue
        if RANK in env and is_below(parent, launcher.pid):
            found[int(env[RANK])] = int(pid)
    return found


def wait_for_steps(out, n, launcher):
    path = os.path.join(out, "metrics.jsonl")
    for _ in range(3000):
        if os.path.exists(path) and len(open(path).readlines()) >= n:
            return
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.01)
    raise AssertionError("no steps")


def endless(tmp, name, model, data, **over):
    return ini_of(tmp, name, model, data, **{"train__steps": 4000, "train__batch_size": 6, "device__link_gbps": 0.02, **over})


def compare_with_one(tmp, model, data, out):
    """What the hosts have saved is what one process has after so many steps, and one goes on from there."""
    saved = sorted((d for d in os.listdir(out) if d[11:].isdigit()), key=lambda d: int(d[11:]))[-1]
    steps = int(saved[11:])
    one, ini = endless(tmp, os.path.basename(out) + "-one", model, data, device__link_gbps=0)
    megatrain("run", ini, f"--max-steps={steps}")
    compare(os.path.join(one, saved), os.path.join(out, saved), f"{out}, step {steps}")
    return steps


def two_networks(tmp):
    """Processes that hold two network namespaces with a cable between them, and what starts mpirun in the first; None:
    that is not allowed here."""
    hold = ["unshare", "-n", "-u", "sh", "-c"]
    if not OPEN_MPI or subprocess.run([*hold, "ip link set lo up && ip link add x type veth peer name y"],
                                      capture_output=True).returncode:
        return None
    holders = [subprocess.Popen([*hold, f"hostname node{i} && echo && exec sleep 300"], stdout=subprocess.PIPE)
               for i in (1, 2)]
    first, second = (["nsenter", "-t", str(h.pid), "-n", "-u"] for h in holders if h.stdout.readline())
    run = lambda *cmd: subprocess.run(cmd, check=True)
    run(*first, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(holders[1].pid))
    for i, inside in enumerate((first, second), 1):
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "addr", "add", f"10.77.0.{i}/24", "dev", "cable")
        run(*inside, "ip", "link", "set", "cable", "up")
    agent = os.path.join(tmp, "agent")
    with open(agent, "w") as f:
        f.write(f'#!/bin/sh\nshift\nexec {" ".join(second)} sh -c "$*"\n')
    os.chmod(agent, 0o755)
    net = ("--mca", "btl_tcp_if_include", "cable", "--mca", "oob_tcp_if_include", "cable", "--mca", "plm_rsh_agent", agent)
    return holders, second, [*first, *LAUNCH, "--host", "10.77.0.1,10.77.0.2", "--map-by", "ppr:1:node", *net, BINARY]


def network_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def within(holders):
    """All processes in the network namespaces of these."""
    networks = {network_of(h.pid) for h in holders} - {None}
    return [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if network_of(pid) in networks]
