# SPDX-License-Identifier: Apache-2.0
"""The plan of a step that hosts share, beside the step: two network namespaces with a cable between them, whose rate
`tc` limits; each host has a core (meson test --benchmark -v bench/hosts). Takes some seven minutes; needs root, Open
MPI and two idle cores. The first steps are so short that the link is most of them.

Rates of one host are measured while the other one works, as both share caches and memory here.
"""
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
import hosts
from tiny import BINARY, base, config, metrics, write_data, write_ini, write_model

RATES, STEPS = ("200mbit", "400mbit", "1gbit"), 8
SIZES = (8, 32), (8, 128), (32, 128)  # rows of a step, and tokens of a row
SHAPE = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4)
COMMON = {"model__dtype": "bf16", "model__init": "random", "checkpoint__every": 0, "device__cpu_threads": 1,
          "train__warmup": 0, "train__micro_batch": 1, "train__groups": 8, "data__overlong": "truncate"}
SMALL_BUFFERS = ("--mca", "btl_tcp_sndbuf", "131072")  # else answers of MPI wait behind what is sent


def on_core(core, *cmd):
    p = subprocess.run(["taskset", "-c", str(core), *cmd], capture_output=True, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(cmd)}: exit {p.returncode}\n{p.stdout}{p.stderr}")
    return p.stdout


def step_seconds(out):
    return statistics.median([m["t_step"] for m in metrics(out) if "t_step" in m][1:])


def second_host_on_core_1(tmp):
    agent = os.path.join(tmp, "agent")
    with open(agent) as f:
        text = f.read().replace("exec ", "exec taskset -c 1 ")
    with open(agent, "w") as f:
        f.write(text)


def measure_one(ini, busy):
    """This host's rates and its step alone, while the other core works."""
    other = subprocess.Popen(["taskset", "-c", "1", BINARY, "-q", "run", busy, "--no-save", "--force"])
    try:
        on_core(0, BINARY, "-q", "plan", ini, "--measure")
        plan = json.loads(on_core(0, BINARY, "plan", ini, "--json"))["step_seconds"]
        on_core(0, BINARY, "-q", "run", ini, "--no-save", "--force")
        return plan
    finally:
        other.kill()
        other.wait()


def compare(tmp, model, data, rows, length, second, launch):
    def at(name, steps):
        out = os.path.join(tmp, f"{name}-{rows}-{length}")
        return out, write_ini(out + ".ini", base(model, data, out, **{**COMMON, "train__steps": steps, "train__batch_size": rows,
                                                                    "data__seq_len": length}))
    one, ini = at("one", STEPS)
    plan = measure_one(ini, at("busy", 100000)[1])
    print(f"{rows * length:5} tokens, one host          plan {plan:.3f} s, step {step_seconds(one):.3f} s: "
          f"{step_seconds(one) / plan:.3f}", flush=True)
    first = launch[:launch.index(hosts.LAUNCH[0])]
    for rate in RATES:
        for inside in (first, second):
            on_core(0, *inside, *f"tc qdisc replace dev cable root tbf rate {rate} burst 256kb latency 50ms".split())
        on_core(0, *launch, "-q", "probe", "net")
        found = json.loads(on_core(0, BINARY, "plan", ini, "--hosts", "2", "--json"))
        plan = found["step_seconds"]
        busy, = (r["busy_seconds"] for r in found["resources"] if r["resource"] == "network")
        out, shared = at("two-" + rate, STEPS)
        on_core(0, *launch, "-q", "run", shared, "--no-save")
        print(f"{rows * length:5} tokens, two hosts, {rate:7} plan {plan:.3f} s, the link {busy / plan:4.0%} of it, step "
              f"{step_seconds(out):.3f} s: {step_seconds(out) / plan:.3f}   target 0.9 to 1.1", flush=True)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        found = hosts.two_networks(tmp)
        if not found:
            print("no network namespaces, or no Open MPI")
            sys.exit(77)
        holders, second, launch = found
        launch[-1:-1] = SMALL_BUFFERS
        try:
            second_host_on_core_1(tmp)
            data = write_data(os.path.join(tmp, "data.jsonl"), n=400)
            model = write_model(os.path.join(tmp, "model"), config("qwen2", **SHAPE))
            os.environ["XDG_CACHE_HOME"] = os.path.join(tmp, "cache")
            on_core(0, BINARY, "-q", "probe", "all", "--brief", "--threads", "1")
            print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
            for rows, length in SIZES:
                compare(tmp, model, data, rows, length, second, launch)
        finally:
            for pid in hosts.within(holders):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
