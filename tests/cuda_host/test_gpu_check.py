# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu-check from its first line to its report, on the emulated device: with programs on PATH that
answer as NVIDIA's do, and nothing else on it.

test_gpu_check.py CONFORMANCE KERNELS PEAK DRIVER, with MEGATRAIN naming the emulated binary; the others are the
emulated conformance suite, the benchmarks, and a library that answers as a driver's does.
"""
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types

CHECK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "gpu-check")
conformance, kernels, peak, driver = map(os.path.abspath, sys.argv[1:])
SMI = '#!/bin/sh\necho "Emulated, with a comma, 580.1, 2048, 9.0"\n'
SANITIZER = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do
    case $1 in --tool) tool=$2 ;; esac
    shift 2
done
[ $MEGATRAIN_ATTENTION = tiled ] || exit 9
case $tool" $*" in memcheck*-gemm*) exit 9 ;; memcheck*|*-gemm*-attention*) ;; *) exit 9 ;; esac
"$@" || exit 9
[ $tool = racecheck ] && echo "========= RACECHECK SUMMARY: 0 hazards" || echo "========= ERROR SUMMARY: 0 errors"
"""


#: a suite that breaks off at its second case, as an error of the GPU ends all that follows it
BREAKS = """#!/bin/sh
case $* in
--list) echo add; echo scale; echo add_bias ;;
*=scale*) echo "FAIL scale f32: an illegal address"; echo "2 cases, 1 failures"; exit 1 ;;
*=*) echo "2 cases, 0 failures" ;;
*) kill -SEGV $$ ;;
esac
"""


def write_program(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, 0o755)


def gpu_check(tmp, *args, expect=0, **more):
    env = {**more, "PATH": os.path.join(tmp, "bin") + ":/usr/bin:/bin", "HOME": tmp, "MT_EMU_MEMORY": "2G"}
    p = subprocess.run([sys.executable, CHECK, "--out", os.path.join(tmp, "report"), *args], capture_output=True,
                       text=True, env=env)
    assert p.returncode == expect, f"exit {p.returncode}\n{p.stdout}{p.stderr}"
    return p.stdout


def report(tmp):
    with open(os.path.join(tmp, "report", "report.json")) as f:
        return json.load(f)


def markdown(tmp):
    with open(os.path.join(tmp, "report", "report.md")) as f:
        return f.read()


def statuses(tmp):
    return {name: part["status"] for name, part in report(tmp)["parts"].items()}


def check_right(tmp, build):
    """A few runs of what asks whether the GPU is right, and how a difference is told."""
    loader = importlib.machinery.SourceFileLoader("gpu_check", CHECK)
    check = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    sys.path[:0] = [os.path.dirname(CHECK), os.path.join(os.path.dirname(CHECK), "..", "tests", "cli")]
    loader.exec_module(check)
    c = check.Check(types.SimpleNamespace(minutes=4, out=os.path.join(tmp, "right"), build=build), {"cores": 2})
    right = check.gpu_right
    print(right.families(c, ["llama"]), right.placements(c, ["lora"]))
    right.GROUPS["other"] = ("qwen3", {}, {}, None, {"as it is": {}, "faster": {"train__learning_rate": 0.01}, "wrong": {"train__steps": -1}})
    for tried, said in (("conformance", "1 of 3 cases: scale: "), ("placements", "2 of 3: other, faster: losses [(1, ")):
        try:
            right.conformance(c, "own", 20) if tried == "conformance" else right.placements(c, ["other"])
        except check.Failed as e:
            assert str(e).startswith(said) and ("train.steps" in str(e)) == (tried == "placements"), e
        else:
            raise AssertionError(tried)


with tempfile.TemporaryDirectory() as tmp:
    build = os.path.join(tmp, "build")
    gpu_check(tmp, "--build", build, expect=77)  # neither nvidia-smi nor a driver yet
    os.mkdir(os.path.join(tmp, "lib"))
    os.symlink(driver, os.path.join(tmp, "lib", "libcuda.so.1"))
    gpu_check(tmp, "--build", build, "parity", expect=1, LD_LIBRARY_PATH=os.path.join(tmp, "lib"))
    machine = report(tmp)["machine"]
    assert [machine[k] for k in ("gpu", "driver", "gpu_memory_mib", "capability")] == \
        ["GPU of a driver alone", "of CUDA 13.0", 3072, "121"], machine
    write_program(os.path.join(tmp, "bin", "nvidia-smi"), SMI)
    write_program(os.path.join(tmp, "bin", "compute-sanitizer"), SANITIZER)
    gpu_check(tmp, "--build", build, "parity", expect=1)  # no build either
    assert "No such file" in report(tmp)["parts"]["build"]["why"], report(tmp)

    # few cases and small shapes: what the programs print is what counts here
    write_program(os.path.join(build, "cli", "megatrain"), f'#!/bin/sh\nexec {os.environ["MEGATRAIN"]} "$@"\n')
    write_program(os.path.join(build, "tests", "device", "conformance"), f"#!/bin/sh\nexec {conformance} $1 join\n")
    write_program(os.path.join(build, "tests", "bench", "bench_kernels"), f"#!/bin/sh\nexec {kernels} cpu add\n")
    write_program(os.path.join(build, "tests", "bench", "bench_peak"), f"#!/bin/sh\nexec {peak} cpu\n")
    parts = ["conformance", "parity", "steps-tiny", "kernels", "sanitize", "algorithms-tiny", "steps-tiny-moe", "steps-8b",
             "steps-8b-24g"]
    told = gpu_check(tmp, "--build", build, *parts, MT_EMU_ALGORITHMS="1000,0", MEGATRAIN_PROBE_SMALL="1")
    print(told)
    got = statuses(tmp)
    assert sorted(got) == sorted(["build", *parts]) and list(got)[:2] == ["build", "conformance"], got
    assert all(got[p] == "passed" for p in parts[:7]), told
    assert all(got[p] == "skipped" for p in parts[7:]), told
    r = report(tmp)
    assert r["machine"]["gpu"] == "Emulated, with a comma" and r["machine"]["capability"] == "90", r["machine"]
    run, = r["parts"]["steps-tiny"]["runs"]
    found = r["parts"]["algorithms-tiny"]
    assert found["shapes of products"] > 8 and found["runs"][0]["plan"] == run["plan"], found
    assert found["runs"][0]["loss"] != run["loss"], "the second algorithm has other bits"
    one, beside = r["parts"]["steps-tiny-moe"]["runs"]
    assert one["loss"] == beside["loss"] and beside["plan"]["device.expert_streams"] >= 1, (one, beside)
    assert run["steps"] >= 2 and run["tok_s"] > 0 and run["model_tflops"] >= 0 and run["t_step"] > 0, run
    assert run["plan"]["memory.slots"] >= 2, run
    assert run["h2d_gbps"] >= 0 and 0 <= run["idle_waiting"] <= 1 and run["share_of_peak"] is not None, run
    assert "| qwen2 | 128 | 1024 |" in markdown(tmp) and "% of copy" in markdown(tmp), markdown(tmp)

    # another run adds to the report; without time nothing is run, and that is said
    told = gpu_check(tmp, "--build", build, "--minutes", "0.001", "sanitize", expect=1)
    assert "no time" in told, told
    assert statuses(tmp)["build"] == "no time" and statuses(tmp)["parity"] == "passed", statuses(tmp)
    gpu_check(tmp, "--build", build, "nonsense", expect=2)
    gpu_check(tmp, "--build", build, "--short", "slow", expect=2)
    write_program(os.path.join(build, "tests", "device", "conformance"), BREAKS)
    check_right(tmp, build)
