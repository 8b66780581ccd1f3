# SPDX-License-Identifier: Apache-2.0
"""What is read is what was written, in every command that reads a checkpoint; and nobody's folder is removed."""
import fcntl
import glob
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from runner import FinishedRun, run_tests  # noqa: E402
from tiny import BINARY, FULL, base, config, flip_in_memory, losses, megatrain, middle_of, patience, write_ini  # noqa: E402


class Place(FinishedRun):
    def __init__(self, tmp):
        super().__init__(tmp, layers=2)

    def damaged(self, name):
        """A copy with one bit turned in the middle of a file."""
        bad = os.path.join(self.tmp, "bad")
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(self.good, bad)
        turn(os.path.join(bad, name))
        return bad


def turn(path):
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) * 3 // 4)
        c = f.read(1)[0] ^ 1
        f.seek(os.path.getsize(path) * 3 // 4)
        f.write(bytes([c]))


def export_verifies_what_it_reads(p):
    to = os.path.join(p.tmp, "exported")
    for name in ("model.safetensors", "config.json", "megatrain/state.json", "megatrain/seal.json"):
        r = megatrain("export", p.damaged(name), to, expect=7)
        assert os.path.basename(name) in r.stderr, r.stderr
    megatrain("export", "--dtype", "f32", p.damaged("megatrain/state-00001.safetensors"), to, expect=7)
    assert not [n for n in os.listdir(p.tmp) if n.startswith("exported")]


def an_export_has_sums_of_its_own(p):
    to = os.path.join(p.tmp, "new", "folder")
    megatrain("export", p.good, to + "/")
    megatrain("verify", to)
    megatrain("-q", "run", write_ini(p.tmp + "/from.ini", base(to, p.data, p.tmp + "/from", train__steps=1, model__init="weights")))
    turn(to + "/model.safetensors")
    r = megatrain("verify", to, expect=7)
    assert "model.safetensors" in r.stderr, r.stderr


def what_is_no_file_is_not_waited_for(p):
    """Pipes and devices in the places of a model's files, as a folder of a stranger may have them."""
    for name in ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"):
        for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
            model = os.path.join(p.tmp, "strange")
            shutil.rmtree(model, ignore_errors=True)
            shutil.copytree(p.good, model, ignore=shutil.ignore_patterns("megatrain"))
            path = os.path.join(model, name)
            if os.path.exists(path):
                os.remove(path)
            make(path)
            ini = write_ini(p.tmp + "/strange.ini", base(model, p.data, p.tmp + "/strange-out", train__steps=1, model__init="weights"))
            r = subprocess.run([BINARY, "check", ini], capture_output=True, text=True)
            assert name == "generation_config.json" or (r.returncode == 3 and name in r.stderr), (name, r.returncode, r.stderr)
    shutil.rmtree(model)


def a_killed_export_leaves_nothing_for_good(p):
    to = os.path.join(p.tmp, "again")
    left = to + ".tmp.abcdef"
    os.makedirs(left + "/megatrain")
    megatrain("export", p.good, to)
    assert not os.path.exists(left)
    shutil.rmtree(to)
    os.mkdir(left)
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # one that is under way
    megatrain("export", p.good, to)
    assert os.path.exists(left)
    os.close(fd)
    os.rmdir(left)


def memory_that_changes_is_found_and_mended(p):
    """A bit of a frozen weight in the process's own memory: found within 16 steps, and read from the file again."""
    found = 0
    for seed in range(58 if FULL else 2):
        rng = random.Random(seed)
        out = os.path.join(p.tmp, "memory")
        shutil.rmtree(out, ignore_errors=True)
        ini = write_ini(out + ".ini", base(p.good, p.data, out, train__steps=100000, checkpoint__every=0, model__init="weights",
                                           train__schedule="constant", train__warmup="0", model__freeze="*.mlp.*"))
        run = subprocess.Popen([BINARY, "run", ini], stderr=subprocess.PIPE, text=True)
        try:
            said = line_with(run, "step 3/")
            tensor = rng.choice(("gate_proj", "up_proj", "down_proj"))
            flipped = flip_in_memory(run.pid, middle_of(p.good, f"model.layers.{seed % 2}.mlp.{tensor}.weight"), rng)
            begun = len(losses(out))
            said += line_with(run, "a bit of host memory has changed")
            taken = len(losses(out)) - begun
            found += taken <= 20  # 16 passes, and those that a loaded machine left out or that were not yet printed
            line_with(run, "step")
            assert any(read_memory(run.pid, at, 1) == was for at, was in flipped), "it is not mended"
        finally:
            run.terminate()
            run.communicate()
        assert run.returncode == 143, (run.returncode, said[-500:])
    for name, end in (("signal", lambda run, out: run.terminate()), ("file", lambda run, out: open(f"{out}/STOP", "w").close())):
        out = os.path.join(p.tmp, f"memory-{name}")  # a bit that changes in the last steps
        ini = write_ini(out + ".ini", base(p.good, p.data, out, train__steps=100000, checkpoint__every=0, model__init="weights",
                                           device__link_gbps=0.003, model__freeze="*.mlp.*"))
        run = subprocess.Popen([BINARY, "run", ini], stderr=subprocess.PIPE, text=True)
        line_with(run, "step 2/")
        flip_in_memory(run.pid, middle_of(p.good, "model.layers.1.mlp.down_proj.weight"), rng)
        end(run, out)
        said = run.communicate()[1]
        assert "a bit of host memory has changed" in said, (name, said)
    assert found, "none was found in time"
    print(f"{found} found in time")


def line_with(run, words):
    """What a run says, to the first line with these words."""
    said = ""
    for line in run.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"{words} is not in: {said[-800:]}")


def read_memory(pid, at, n):
    with open(f"/proc/{pid}/mem", "rb", 0) as f:
        f.seek(at)
        return f.read(n)


def is_refused(r):
    """A flip made a weight infinite, or the file's list of tensors no such list."""
    return any(word in r.stderr for word in ("weights must be finite", "header", "model.safetensors:1:"))


def a_bit_that_flips_while_weights_are_first_read_is_not_saved(p):
    """At any of its reads: nothing that was trained on it is saved, and the run starts again as if nothing had been."""
    module = os.environ.get("MEGATRAIN_FLIPS")
    if not module:
        return
    model = os.path.join(p.tmp, "plain")  # without sums of its own
    shutil.copytree(p.good, model, ignore=shutil.ignore_patterns("megatrain"))
    out = os.path.join(p.tmp, "flipped")
    ini = write_ini(out + ".ini", base(model, p.data, out, train__steps=2, checkpoint__every=1, model__init="weights"))
    megatrain("-q", "run", ini)
    known = known_sums(model)
    want, found, again = losses(out), 0, 0
    for nth in range(1, 60 if FULL else 14, 1 if FULL else 4):
        shutil.rmtree(out)
        os.rename(known, known + ".kept")  # the machine has not seen the model
        r = subprocess.run([BINARY, "run", ini], capture_output=True, text=True,
                           env={**os.environ, "LD_PRELOAD": module, "FLIP": f"plain/model:{nth}"})
        if r.returncode:
            assert r.returncode == 3 and ("not read as the file has it" in r.stderr or is_refused(r)), r.stderr
            assert not [n for n in os.listdir(out) if n.startswith("checkpoint-")], os.listdir(out)
            found += "not read as the file has it" in r.stderr
        else:
            assert losses(out) == want, (nth, "silent")
            alike = os.path.exists(known) and open(known).read() == open(known + ".kept").read()
            assert alike or "were not read a second time" in r.stderr, "what was read right is known again"
        os.replace(known + ".kept", known)
        shutil.rmtree(out)
        r = subprocess.run([BINARY, "run", ini], capture_output=True, text=True,
                           env={**os.environ, "LD_PRELOAD": module, "FLIP": f"plain/model:{nth}"})
        if r.returncode:  # it was seen before the sum was compared
            assert is_refused(r), r.stderr
        else:
            assert losses(out) == want, (nth, "silent")
            again += "was not read as it was before" in r.stderr
    assert found and again, "no read was hit"
    print(f"{found} found, {again} mended at once")


def a_bit_that_flips_while_sealed_weights_are_read_is_read_again(p):
    """A model with sums of its own is compared with them while it is loaded, by whatever reads it; damage is named by tensor."""
    module = os.environ.get("MEGATRAIN_FLIPS")
    if not module:
        return
    want = [m for m in megatrain("eval", p.ini, "--model", p.good).stdout.splitlines() if "loss" in m]
    again = 0
    for nth in range(1, 60 if FULL else 14, 1 if FULL else 4):
        r = subprocess.run([BINARY, "eval", p.ini, "--model", p.good], capture_output=True, text=True,
                           env={**os.environ, "LD_PRELOAD": module, "FLIP": f"{os.path.basename(p.good)}/model:{nth}"})
        if r.returncode:
            assert is_refused(r), r.stderr
            continue
        assert [m for m in r.stdout.splitlines() if "loss" in m] == want, (nth, "silent")
        again += "was not read as it was written" in r.stderr
    assert again, "no read was hit"
    r = megatrain("eval", p.ini, "--model", p.damaged("model.safetensors"), expect=7)
    assert "is damaged: it has another checksum than was written" in r.stderr and "read again" in r.stderr, r.stderr
    print(f"{again} mended at once")


def known_sums(model):
    """The file that knows the sums of this model."""
    found = []
    for path in glob.glob(os.path.join(os.environ["XDG_CACHE_HOME"], "megatrain/sums/*.json")):
        with open(path, errors="surrogateescape") as f:  # folders have any names
            if json.load(f)["files"][0]["path"].startswith(os.path.realpath(model) + "/"):
                found.append(path)
    assert len(found) == 1, found
    return found[0]


def a_model_that_changed_behind_its_times_is_not_trained_on(p):
    model = os.path.join(p.tmp, "replaced")
    shutil.copytree(p.good, model, ignore=shutil.ignore_patterns("megatrain"))
    weights = os.path.join(model, "model.safetensors")
    out = os.path.join(p.tmp, "out-replaced")
    ini = write_ini(out + ".ini", base(model, p.data, out, train__steps=1, model__init="weights"))
    megatrain("-q", "run", ini)
    first, before = losses(out), os.stat(weights)
    turn(weights)
    shutil.rmtree(out)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    r = megatrain("-q", "run", ini, expect=3)
    assert "not what this machine has read before" in r.stderr and known_sums(model) in r.stderr, r.stderr
    os.utime(weights)  # another file by its times: it is new to the machine
    shutil.rmtree(out)
    megatrain("-q", "run", ini)
    assert losses(out) != first


def weights_alone_have_sums(p):
    out = os.path.join(p.tmp, "weights")
    ini = write_ini(out + ".ini", base(p.model, p.data, out, train__steps=2, checkpoint__save="weights"))
    megatrain("-q", "run", ini)
    megatrain("verify", out + "/checkpoint-2")
    r = megatrain("-q", "run", ini, "--resume", expect=7)
    assert "only weights" in r.stderr, r.stderr
    turn(out + "/checkpoint-2/model.safetensors")
    megatrain("verify", out + "/checkpoint-2", expect=7)


def damaged_weights_are_not_evaluated_or_trained_on(p):
    bad = p.damaged("model.safetensors")
    r = megatrain("eval", p.ini, "--model", bad, expect=7)
    assert "model.safetensors" in r.stderr, r.stderr
    megatrain("sample", "--model", bad, "--prompt", "a", "--max-tokens", 1, expect=7)
    ini = write_ini(p.tmp + "/onbad.ini", base(bad, p.data, p.tmp + "/onbad", train__steps=1, model__init="weights"))
    megatrain("-q", "run", ini, expect=7)
    megatrain("eval", p.ini, "--model", p.good)


def export_removes_nothing_that_it_did_not_make(p):
    to = os.path.join(p.tmp, "mine")
    os.mkdir(to + ".tmp")
    open(to + ".tmp/precious", "w").close()
    megatrain("export", p.good, to)
    assert os.listdir(to + ".tmp") == ["precious"]
    assert sorted(n for n in os.listdir(p.tmp) if n.startswith("mine")) == ["mine", "mine.tmp"]


def bench_removes_its_own_results_alone(p):
    out = os.path.join(p.tmp, "bench")
    sweep = write_ini(p.tmp + "/sweep.ini", {**base(p.model, p.data, p.tmp + "/x", train__steps=2),
                                             "sweep": {"repeat": 1, "warmup_steps": 0}})
    os.makedirs(out + "/keep")
    for name in ("keep/thesis", "notes.md", "0123456789abcdef.txt"):
        open(os.path.join(out, name), "w").close()
    there = sorted(os.listdir(out))
    megatrain("bench", sweep, "--out", out, "--force", "--only", "nomatch", expect=2)
    assert sorted(os.listdir(out)) == there
    megatrain("-q", "bench", sweep, "--out", out, "--force")
    first = sorted(os.listdir(out))
    assert set(there) < set(first)
    stale = os.path.join(out, "fedcba9876543210.ini")
    open(stale, "w").close()
    megatrain("-q", "bench", sweep, "--out", out, "--force")
    assert sorted(os.listdir(out)) == first and os.path.exists(out + "/keep/thesis")


def text_of_others_does_not_reach_a_terminal_as_it_is(p):
    evil = "\x1b]0;owned\x07\x9b31mw"
    model = os.path.join(p.tmp, "evil.safetensors")
    header = json.dumps({evil: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    with open(model, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + bytes(4))
    data = os.path.join(p.tmp, "evil.jsonl")
    with open(data, "w") as f:
        f.write(json.dumps({evil: 1}) + "\n")
    out = os.path.join(p.tmp, "evil")
    ini = write_ini(out + ".ini", base(p.model, data, out))
    for cmd in (["inspect", model], ["run", ini], ["run", os.path.join(p.tmp, evil)], ["verify", os.path.join(p.tmp, evil)],
                ["export", os.path.join(p.tmp, evil), out]):
        r = megatrain(*cmd, expect=None)
        bad = [c for c in r.stdout + r.stderr if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
        assert not bad, (cmd, bad, r.stdout, r.stderr)
    assert "\\x1b]0;owned\\x07" in megatrain("inspect", model).stdout


def a_sweep_that_is_killed_takes_its_run_along(p):
    out = os.path.join(p.tmp, "killed")
    sweep = write_ini(p.tmp + "/killed.ini", {**base(p.model, p.data, p.tmp + "/x"),
                                              "sweep": {"repeat": 1, "warmup_steps": 0, "steps": 100000}})
    for signo in (signal.SIGKILL, signal.SIGTERM):
        bench = subprocess.Popen([BINARY, "-q", "bench", sweep, "--out", out, *(["--resume"] if os.path.exists(out) else [])],
                                 stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        runs = os.path.join(out, "runs")
        wait(lambda: glob.glob(runs + "/*/metrics.jsonl") and children(bench.pid))
        child, = children(bench.pid)
        r = megatrain("bench", sweep, "--out", out, "--resume", expect=2)
        assert "in use" in r.stderr, r.stderr
        bench.send_signal(signo)
        bench.wait()
        wait(lambda: not os.path.exists(f"/proc/{child}") or open(f"/proc/{child}/stat").read().split()[2] == "Z")
        assert not glob.glob(out + "/*.json"), os.listdir(out)  # nothing is taken for a result
        shutil.rmtree(runs)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(n) for n in f.read().split()]


def wait(what, seconds=60):
    end = time.time() + patience(seconds)
    while not what():
        assert time.time() < end
        time.sleep(0.02)


def results_of_others_are_read_with_care(p):
    folder = os.path.join(p.tmp, "odd")
    os.makedirs(folder)
    for axes in ({"a": 1, "b": None}, [1, 2], "x", {"a": "1", "b": {"c": 2}}):
        rows = [{"job": "j", "axes": axes, "status": "ok", "tok_s": 5}, {"job": 7, "axes": axes, "status": 3}]
        with open(folder + "/sweep.json", "w") as f:
            json.dump(rows, f)
        r = megatrain("report", folder, "--out", p.tmp + "/odd.html", expect=None)
        assert 0 <= r.returncode < 64, (axes, r.returncode, r.stderr)


if __name__ == "__main__":
    run_tests(globals(), Place)
