# SPDX-License-Identifier: Apache-2.0
"""Where things are on a GPU, and what they may take: plan and run agree, and host memory is locked as asked. On the
emulated one."""
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, losses, megatrain, write_data, write_ini, write_model


def run_and_plan_say_the_same(tmp, model, data, env):
    """Of a budget that is auto or a share, too: of what is free on the GPU, less what is left to others."""
    env = {**env, "MEGATRAIN_RESIDENT": str(40 << 20)}
    for budget in ("auto", "3%", "34MiB"):
        out = os.path.join(tmp, "same")
        ini = write_ini(out + ".ini", base(model, data, out, train__micro_batch="auto", data__packing="on",
                                           memory__device_budget=budget, memory__host_budget="6GiB"))
        said = json.loads(megatrain("-q", "plan", ini, "--json", env=env).stdout)
        megatrain("-q", "run", ini, "--force", "--max-steps", 1, "--no-save", env=env)
        did = json.load(open(os.path.join(out, "run.json")))
        assert said["device_budget"] == did["device_budget"] and said["device_bytes"] == did["device_bytes"], (said, did)
        assert [r for r in did["memory"] if r["use"] != "a checkpoint"] == said["memory"], (said["memory"], did["memory"])
        assert said["step_seconds"] == did["predicted"]["t_step"]
        effective = open(os.path.join(out, "config.effective.ini")).read()
        for key, value in said["settings"].items():
            assert f"\n{key.split('.')[1]} = {value} ;" in effective, (key, value, effective)


def budget(ini, **env):
    return json.loads(megatrain("-q", "plan", ini, "--json", env=env).stdout)["device_budget"]


def windows_keeps_an_eighth_of_the_gpu(tmp, model, data, env):
    """Which it moves to host memory, at a price, or refuses, where a program takes nearly all of it."""
    out = os.path.join(tmp, "wsl")
    ini = write_ini(out + ".ini", base(model, data, out, memory__device_budget="auto"))
    env = {**env, "MT_EMU_MEMORY": "16G", "MT_EMU_DISPLAY": "1"}
    assert budget(ini, **env) - budget(ini, **env, MT_EMU_WSL="1") == 1 << 29


def a_gpu_without_memory_of_its_own_takes_the_hosts(tmp, model, data, env):
    """Of one memory for both (DGX Spark, Jetson) what the GPU gets is not counted for the host once more: a quarter, or
    what is configured."""
    out = os.path.join(tmp, "integrated")
    ini = write_ini(out + ".ini", base(model, data, out, memory__device_budget="auto", memory__host_budget="100%"))
    env = {**env, "MT_EMU_INTEGRATED": "1", "MT_EMU_MEMORY": "64G"}
    for device, share in ("auto", 0.25), ("50%", 0.5):
        said = json.loads(megatrain("-q", "plan", ini, "--json", "--set", "memory.device_budget=" + device, env=env).stdout)
        both = said["device_budget"] + said["host_budget"]
        assert abs(said["device_budget"] / both - share) < 0.01, (device, said)


def planes_are_locked_as_asked(tmp, model, data, env):
    """Where only 1 MiB may be locked, all of it is too much, and the staging ring alone is not: with the same bits."""
    got = {}
    advice = {"auto": "ulimit -l", "all": "Linux without Windows", "staging": ""}
    for pin in ("auto", "all", "staging"):
        out = os.path.join(tmp, "pin-" + pin)
        ini = write_ini(out + ".ini", base(model, data, out, train__steps=2, memory__pin=pin))
        wsl = {"MT_EMU_WSL": "1"} if pin == "all" else {}
        said = megatrain("run", ini, env={**env, "MT_EMU_PIN_LIMIT": "1M", **wsl}).stderr
        assert ("could be locked" in said) == (pin != "staging"), (pin, said)
        assert advice[pin] in said, (pin, said)
        got[pin] = losses(out)
    assert got["auto"] == got["all"] == got["staging"], got


with tempfile.TemporaryDirectory() as tmp:
    env = {"XDG_CACHE_HOME": os.path.join(tmp, "cache"), "MEGATRAIN_PROBE_SMALL": "1"}
    model = write_model(os.path.join(tmp, "model"), config(num_hidden_layers=3))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    megatrain("-q", "probe", "all", "--force", "--brief", "--device", "cuda", "--threads", 2, env=env)
    run_and_plan_say_the_same(tmp, model, data, env)
    windows_keeps_an_eighth_of_the_gpu(tmp, model, data, env)
    a_gpu_without_memory_of_its_own_takes_the_hosts(tmp, model, data, env)
    planes_are_locked_as_asked(tmp, model, data, env)
