# SPDX-License-Identifier: Apache-2.0
"""`probe all` measures a GPU, plan and run use what it says of that GPU and of no other: on the emulated one."""
import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, write_data, write_ini, write_model

RATES = {
    "compute": ("gemm_bf16_tflops", "gemm_f32_tflops", "attention_tflops", "attention_bwd_tflops", "memory_gbs",
                "operation_us", "memory_gib"),
    "link": ("h2d_gbs", "d2h_gbs", "h2d_both_gbs", "d2h_both_gbs", "copy_us"),
    "host": ("cores", "memory_gib", "dram_gbs"),
}
PRODUCTS = ("gemm_nt", "gemm_nn", "gemm_tn")
MOVES = ("rmsnorm", "rmsnorm_bwd", "glu", "glu_bwd", "qk_rope", "qk_rope_bwd", "bias_bwd", "embedding", "embedding_bwd",
         "gather_rows", "scatter_rows", "cross_entropy", "grad_cast")
# each shape also in a variant: with QK-norm, without a gradient
VARIED = ("cross_entropy", "qk_rope_bwd")


def shapes(ops, kind, dtype):
    return {name.split(".")[3] for name in ops if name.startswith(f"{kind}.{dtype}.")}


def every_rate_is_of_the_gpu(env):
    said = json.loads(megatrain("-q", "probe", "all", "--force", "--device", "auto", "--threads", 2, "--json", env=env).stdout)
    assert "host emulation, sm_90" in said["name"], said["name"]
    assert said["name"] in said["fingerprint"], said["fingerprint"]
    for section, keys in RATES.items():
        for key in keys:
            rate = said[section][key]
            assert rate["value"] > 0 and rate["source"] == "measured", (section, key, rate)
    ops = said["ops"]
    assert all(seconds > 0 for seconds in ops.values()), ops
    for dtype in ("f32", "bf16"):
        assert all(len(shapes(ops, kind, dtype)) == 8 for kind in PRODUCTS), sorted(ops)
        assert all(len(shapes(ops, kind, dtype)) == 3 for kind in ("attention", "attention_bwd")), sorted(ops)
        got = {kind: len(shapes(ops, kind, dtype)) for kind in MOVES}
        assert got == {kind: 4 if kind in VARIED else 2 for kind in MOVES}, got
    return said["profile"]


def rewrite(path, pattern, by):
    text = open(path).read()
    changed, n = re.subn(pattern, by, text, flags=re.M)
    assert n == 1, pattern
    with open(path, "w") as f:
        f.write(changed)


def plan_and_run_use_it(tmp, ini, profile, env):
    plan = lambda: json.loads(megatrain("-q", "plan", ini, "--json", env=env).stdout)
    measured = plan()
    assert "host emulation" in measured["machine"] and measured["fits"]
    assert measured["device_budget"] == 64 << 20
    assert "predicted" in megatrain("run", ini, env=env).stderr
    rewrite(profile, r"^h2d_gbs = .*", "h2d_gbs = 0.0001 measured")
    slow = plan()
    moved = {r["resource"]: r["bytes"] for r in slow["resources"]}["H2D link"]
    assert slow["step_seconds"] > moved / 1e5 > 10 * measured["step_seconds"], (slow, measured)


def other_devices_have_profiles_of_their_own(ini, env):
    not_measured = "Time      not measured: megatrain probe all"
    said = megatrain("plan", ini, "--set", "device.kind=cpu", env=env).stdout
    assert not_measured in said and "has not been measured with device cpu" in said and "--device cpu" in said, said
    said = megatrain("plan", ini, env={**env, "MT_EMU_CAPABILITY": "86"}).stdout
    assert not_measured in said and "sm_86" in said and "sm_90" in said and "other hardware" in said, said
    assert not_measured not in megatrain("plan", ini, env=env).stdout
    assert "no prediction" in megatrain("run", ini, "--force", env={**env, "MT_EMU_CAPABILITY": "86"}).stderr
    megatrain("-q", "probe", "all", "--force", "--device", "cpu", "--threads", 2, env=env)
    cpu = json.loads(megatrain("-q", "plan", ini, "--json", "--set", "device.kind=cpu", env=env).stdout)
    assert cpu["machine"].startswith("cpu ("), cpu["machine"]


def what_the_planner_needs_more_is_measured_there(ini, profile, env):
    before = open(profile).read()
    megatrain("-q", "plan", ini, "--measure", env=env)
    after = open(profile).read()
    assert len(after.splitlines()) > len(before.splitlines()) and "host emulation" in after, after


def a_device_that_is_none_is_refused(env):
    assert "cpu, cuda or auto" in megatrain("probe", "all", "--device", "gpu", env=env, expect=2).stderr
    assert "GPU 7" in megatrain("probe", "all", "--device", "cuda", "--index", 7, env=env, expect=5).stderr


with tempfile.TemporaryDirectory() as tmp:
    env = {"XDG_CACHE_HOME": os.path.join(tmp, "cache"), "MEGATRAIN_PROBE_SMALL": "1"}
    model = write_model(os.path.join(tmp, "model"), config(num_hidden_layers=3))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    ini = write_ini(os.path.join(tmp, "run.ini"), base(model, data, os.path.join(tmp, "out"), train__steps=2))
    a_device_that_is_none_is_refused(env)
    profile = every_rate_is_of_the_gpu(env)
    plan_and_run_use_it(tmp, ini, profile, env)
    other_devices_have_profiles_of_their_own(ini, env)
    what_the_planner_needs_more_is_measured_there(ini, profile, env)
