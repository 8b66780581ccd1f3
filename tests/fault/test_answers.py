# SPDX-License-Identifier: Apache-2.0
"""In every phase of a run, time limits, STOP, SAVE and signals are answered within two seconds, a micro-batch and a save.

    test_answers.py                           each phase and each request once or so, at random moments
    test_answers.py --moments 20 [PHASE...]   20 random moments of each pair; prints a table
"""
import concurrent.futures
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import BINARY, base, config, losses, patience, planes, write_data, write_ini, write_model

LIMIT = 2.0
ENDS = {"limit": 75, "STOP": 143, "SIGTERM": 143, "SIGINT": 130}
SAVES, TELLS = ("SAVE", "SIGUSR1"), ("SIGUSR2",)
# What a phase is called by the status, a run that has it for long, and whether a step before it is not saved.
PHASES = {
    "tokenising": ("reading data", {}, False),
    "loading": ("reading weights", {"model__init": "weights"}, False),
    "reference": ("computing the reference", {"preference__loss": "sigmoid", "data__eval": "5%"}, False),
    "first evaluation": ("evaluating", {"eval__at_start": "on"}, False),
    "step": ("training", {}, True),
    "periodic evaluation": ("evaluating", {"eval__every": 1}, True),
    "saving": ("saving a checkpoint", {"checkpoint__every": 1, "data__eval": ""}, True),
    "last evaluation": ("evaluating", {"train__steps": 1}, False),
}


class Files:
    def __init__(self, tmp):
        self.tmp = tmp
        self.model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=6))
        self.data = write_data(os.path.join(tmp, "data.jsonl"), n=300)
        self.many = write_data(os.path.join(tmp, "many.jsonl"), n=18000, seed=2)
        self.pairs = os.path.join(tmp, "pairs.jsonl")
        r = random.Random(4)
        ids = lambda: [r.randrange(272) for _ in range(r.randrange(3, 16))]
        with open(self.pairs, "w") as f:
            for _ in range(4000):
                f.write(json.dumps({"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()}) + "\n")
        self.spoken = shutil.copytree(self.model, os.path.join(tmp, "spoken"))
        with open(os.path.join(self.spoken, "tokenizer.json"), "w") as f:
            f.write("{}")
        self.text = os.path.join(tmp, "text.jsonl")
        with open(self.text, "w") as f:
            f.write('{"text": "a text"}\n')
        self.helper = os.path.join(tmp, "helper.py")  # a tokenizer that takes long
        with open(self.helper, "w") as f:
            f.write("import time\ntime.sleep(60)\n")
        self.seed, self.wide = (self.stored(n, m) for n, m in (("seed", self.model), ("wide", write_model(
            os.path.join(tmp, "large"), config("qwen2", num_hidden_layers=4, intermediate_size=8256)))))

    def stored(self, name, model):
        """A checkpoint of weights."""
        out = os.path.join(self.tmp, name)
        ini = write_ini(out + ".ini", base(model, self.data, out, train__steps=1, checkpoint__save="weights", data__eval=""))
        subprocess.run([BINARY, "-q", "run", ini], check=True)
        return out

    def slow_base(self, out):
        """A run whose steps take long, since they read their frozen base from slow files, and the environment of that."""
        return ({"LD_PRELOAD": os.environ.get("MEGATRAIN_SLOW"), "SLOW_READ": "wide/checkpoint-1/model.safetensors:700",
                 "SLOW_AFTER": out + "/metrics.jsonl", "MEGATRAIN_IO": "threads"},
                {"model__path": self.wide + "/checkpoint-1", "model__init": "weights", "model__dtype": "bf16", "adapter__kind": "lora",
                 "memory__base": "files", "data__eval": "", "memory__activations": "recompute"})

    def run(self, phase, out, limit):
        over = {"data__eval": self.many, "eval__max_samples": 18000, "train__steps": 100000, **PHASES[phase][1]}
        env, data, model = {}, self.data, self.model
        slow = os.environ.get("MEGATRAIN_SLOW")
        if phase == "tokenising":
            data, model = self.text, self.spoken
            over.update(data__cache_dir=out + "-cache")
            env = {"MEGATRAIN_DATA_HELPER": self.helper, "MEGATRAIN_PYTHON": sys.executable}
        elif phase == "loading":
            model = self.seed + "/checkpoint-1"
            env = {"LD_PRELOAD": slow, "SLOW_READ": "seed/checkpoint-1/model.safetensors:100"}
        elif phase == "step":
            env, more = self.slow_base(out)
            over.update(more)
        elif phase == "saving":
            env = {"LD_PRELOAD": slow, "SLOW_SYNC": "checkpoint-:200"}
        elif phase == "reference":
            data = self.pairs
        if limit:
            over["checkpoint__time_limit"] = f"{limit:.2f}s"
        ini = write_ini(out + ".ini", base(model, data, out, **over))
        with open(out + ".log", "w") as log:
            return subprocess.Popen([BINARY, "run", ini], stdout=log, stderr=log, env={**os.environ, **env})


def said(out):
    with open(out + ".log") as f:
        return f.read()


def wait_for(p, out, what, seconds, each=lambda: None):
    """When `what` matches what the run says; None: it ends or the time is over before."""
    end = time.time() + seconds
    while time.time() < end:
        if re.search(what, said(out)):
            return time.time()
        if p.poll() is not None:
            return time.time() if re.search(what, said(out)) else None
        each()
        time.sleep(0.02)
    return None


def catches(p, signo):
    with open(f"/proc/{p.pid}/status") as f:
        return int(re.search(r"SigCgt:\s*(\w+)", f.read())[1], 16) >> (signo - 1) & 1


def reach(p, phase, out):
    """Waits until the run is in the phase."""
    words, _, needs_step = PHASES[phase]
    asked = 0

    def ask():
        nonlocal asked
        if time.time() - asked > 0.3 and p.poll() is None and catches(p, signal.SIGUSR2):
            asked = time.time()
            p.send_signal(signal.SIGUSR2)
    steps = r"[1-9]\d* of \d+ steps done, " if needs_step else ""
    assert wait_for(p, out, f"status: {steps}.*{words}", 60, ask), (phase, said(out))


def answer(files, phase, request, rng, number):
    """Seconds from the request to its answer; of a save that is under way, its own apart. On a fast machine the phase may be
    over by then."""
    out = os.path.join(files.tmp, f"{phase}-{request}-{number}".replace(" ", "-"))
    wait = rng.random() * 1.5
    stepped = lambda: PHASES[phase][2] or "step 1/" in said(out)
    began = time.time()
    p = files.run(phase, out, None)
    reach(p, phase, out)
    if request == "limit":  # at what time is known now: the same again
        took = time.time() - began
        p.kill()
        p.wait()
        shutil.rmtree(out, ignore_errors=True)
        began = time.time()
        p = files.run(phase, out, took + wait)
        asked = began + took + wait
    else:
        time.sleep(wait)
        asked = time.time()
        before, stepped_before = len(said(out)), stepped()
        if request in ("STOP", "SAVE"):
            open(os.path.join(out, request), "w").close()
        else:
            p.send_signal(getattr(signal, request))
    if request in ENDS:
        p.wait(timeout=60)
        took = time.time() - asked
        assert p.returncode == ENDS[request], (phase, request, p.returncode, said(out))
        saved = [n for n in os.listdir(out) if re.fullmatch(r"checkpoint-\d+", n)]
        assert bool(saved) == stepped() or phase == "last evaluation" or request == "limit", (phase, request, saved, said(out))
        assert request == "limit" or not os.path.exists(os.path.join(out, request))
    else:
        what = "status: " if request in TELLS else "saved checkpoint-|nothing to save"
        rest = lambda: said(out)[before:]
        end = time.time() + 60
        while not re.search(what, rest()):
            assert time.time() < end and p.poll() is None, (phase, request, said(out))
            time.sleep(0.01)
        took = time.time() - asked
        saved = "nothing to save" not in rest()
        kept = phase in ("saving", "last evaluation")  # the last save comes before the last evaluation
        assert request in TELLS or saved in (stepped_before, stepped()) or kept, (phase, request, rest())
        assert not os.path.exists(os.path.join(out, request)), f"{request} stays after its answer, in {phase}"
        p.kill()
        p.wait()
    save = max([float(s) for s in re.findall(r"saved checkpoint-\d+ in (\d+\.\d) s", said(out))], default=0)
    shutil.rmtree(out, ignore_errors=True)
    return max(0, took - save)


def check_bits(files):
    """A save in the middle of a step does not wait for its end, and the step is made again with the same bits."""
    want, out = os.path.join(files.tmp, "want"), os.path.join(files.tmp, "asked")
    env, keys = files.slow_base(out)
    keys["train__steps"] = 2
    subprocess.run([BINARY, "-q", "run", write_ini(want + ".ini", base(files.model, files.data, want, **keys))], check=True)
    ini = write_ini(out + ".ini", base(files.model, files.data, out, **keys))
    with open(out + ".log", "w") as log:
        p = subprocess.Popen([BINARY, "run", ini], stdout=log, stderr=log, env={**os.environ, **env})
    assert wait_for(p, out, "step 1/", 60), said(out)
    time.sleep(0.3)
    p.send_signal(signal.SIGUSR1)
    assert p.wait(timeout=60) == 0 and 0 <= said(out).find("saved checkpoint-1 ") < said(out).find("step 2/"), said(out)
    assert losses(out) == losses(want) and planes(out + "/checkpoint-2") == planes(want + "/checkpoint-2")


def pairs(moments, phases, at):
    """(phase, request) as often as there are moments; 0: each phase and each request once or twice."""
    requests = [*ENDS, *SAVES, *TELLS]
    if moments:
        return [(phase, r) for phase in phases for r in requests for _ in range(moments)]
    return [(phase, requests[(i + at) % len(requests)]) for i, phase in enumerate(phases)]


def check_learners(files):
    """One of two runs on a base is stopped in the middle of a step: it is saved, and the other has the bits it has alone."""
    env, keys = files.slow_base(os.path.join(files.tmp, "ends"))
    keys["train__steps"] = 2
    outs = {n: os.path.join(files.tmp, n) for n in ("alone", "goes-on", "ends")}
    inis = {n: write_ini(out + ".ini", base(files.model, files.data, out, **keys)) for n, out in outs.items()}
    subprocess.run([BINARY, "-q", "run", inis["alone"]], check=True)
    with open(outs["ends"] + ".log", "w") as log:
        p = subprocess.Popen([BINARY, "run", inis["ends"], inis["goes-on"]], stdout=log, stderr=log, env={**os.environ, **env})
    assert wait_for(p, outs["ends"], "ends \\| step 1/", 60), said(outs["ends"])
    time.sleep(0.3)
    open(os.path.join(outs["ends"], "STOP"), "w").close()
    p.wait(timeout=60)
    left = {n: sorted(e for e in os.listdir(outs[n]) if e.startswith("checkpoint-")) for n in ("ends", "goes-on")}
    assert left == {"ends": ["checkpoint-1"], "goes-on": ["checkpoint-2"]}, (left, said(outs["ends"]))
    assert losses(outs["goes-on"]) == losses(outs["alone"])
    assert planes(outs["goes-on"] + "/checkpoint-2") == planes(outs["alone"] + "/checkpoint-2")


def main():
    moments = int(sys.argv[2]) if sys.argv[1:2] == ["--moments"] else 0
    phases = sys.argv[3:] or [p for p in PHASES if os.environ.get("MEGATRAIN_SLOW") or p not in ("loading", "step", "saving")]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it, and what they start
    seed = int(os.environ.get("MEGATRAIN_TEST_SEED", random.randrange(1 << 30)))
    print(f"seed {seed}")
    rng, took = random.Random(seed), {}
    with tempfile.TemporaryDirectory() as tmp, concurrent.futures.ThreadPoolExecutor(2 if moments else 3) as pool:
        files = Files(tmp)
        if not moments and os.environ.get("MEGATRAIN_SLOW"):
            check_bits(files)
            check_learners(files)
        jobs = {pool.submit(answer, files, p, r, random.Random(rng.random()), i): (p, r)
                for i, (p, r) in enumerate(pairs(moments, phases, rng.randrange(7)))}
        failed = []
        for job in concurrent.futures.as_completed(jobs):
            if job.exception():
                failed.append((*jobs[job], str(job.exception())))
                print("FAIL", failed[-1], flush=True)
            else:
                took.setdefault(jobs[job], []).append(job.result())
    print(f"{'seconds to the answer':22}" + "".join(f"{r:>9}" for r in (*ENDS, *SAVES, *TELLS)))
    for phase in phases:
        row = [took.get((phase, r)) for r in (*ENDS, *SAVES, *TELLS)]
        print(f"{phase:22}" + "".join(f"{max(t):9.2f}" if t else f"{'':9}" for t in row))
    late = {k: max(t) for k, t in took.items() if max(t) > patience(LIMIT)}
    assert not late and not failed, (late, failed)


main()
