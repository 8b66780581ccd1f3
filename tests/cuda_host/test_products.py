# SPDX-License-Identifier: Apache-2.0
"""The fastest of a library's algorithms for products is found once, holds for every placement, and goes with a run's
checkpoints: on the emulated GPU, whose algorithms differ in time and in bits."""
import glob
import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import base, config, megatrain, planes, write_data, write_ini, write_model

TWO = {"MT_EMU_ALGORITHMS": "0,0"}
SECOND_IS_FASTER, FIRST_IS_FASTER = {"MT_EMU_ALGORITHMS": "3000,0"}, {"MT_EMU_ALGORITHMS": "0,3000"}


class Machine:
    def __init__(self, tmp, name):
        self.tmp, self.cache = tmp, os.path.join(tmp, name)
        self.env = {"XDG_CACHE_HOME": self.cache, "MEGATRAIN_PROBE_SMALL": "1"}

    def run(self, name, *more, env=None):
        out = os.path.join(self.tmp, name)
        ini = out + ".ini"
        if not os.path.exists(ini):
            write_ini(ini, base(os.path.join(self.tmp, "model"), os.path.join(self.tmp, "data.jsonl"), out,
                                model__dtype="bf16", train__steps=2, checkpoint__every=1))
        text = megatrain("run", ini, *more, env={**self.env, **TWO, **(env or {})}).stderr
        assert "another library or GPU" not in text, text
        return out

    def measure(self, name, env):
        """The table's text."""
        megatrain("-q", "plan", os.path.join(self.tmp, name + ".ini"), "--measure", env={**self.env, **env})
        return open(self.file()).read()

    def file(self):
        found, = glob.glob(os.path.join(self.cache, "**", "products-*.txt"), recursive=True)
        assert found.endswith("/products-host-emulation-cuBLASLt-13.0.0-sm-90-2-multiprocessors.txt"), found
        return found


def parts_of(table):
    """The number of parts of K of every choice."""
    entry = r"[nt][nt] bf16 (?:bf16|f32)(?: bias)?(?: add)? \d+x\d+x\d+ 0/(\d)/0/1/0/0/0/0/0"
    assert all(re.fullmatch(entry, e) for e in table.strip().split("; ")), table
    return [int(n) for n in re.findall(entry, table)]


def end(out):
    return planes(os.path.join(out, "checkpoint-2"))


def found(out):
    return json.load(open(os.path.join(out, "checkpoint-2", "megatrain", "state.json")))["device_findings"]


with tempfile.TemporaryDirectory() as tmp:
    write_model(os.path.join(tmp, "model"), config(num_hidden_layers=2))
    write_data(os.path.join(tmp, "data.jsonl"))
    m = Machine(tmp, "cache")
    first = m.run("first")
    early = m.run("early", "--max-steps", 1)
    megatrain("-q", "probe", "all", "--force", "--brief", "--threads", 2, env=m.env)

    table = m.measure("first", SECOND_IS_FASTER)
    assert len(parts_of(table)) > 8 and set(parts_of(table)) == {2}, table
    assert m.measure("first", FIRST_IS_FASTER) == table, "a shape is timed once"

    chosen = m.run("chosen")
    assert end(chosen) != end(first)
    assert "products: " not in found(first) and found(chosen).endswith("products: " + table.strip()), found(chosen)
    # whatever the placement; another number of threads has another profile, and the same choices
    assert end(m.run("placed", "--set", "device.cpu_threads=1", "--set", "memory.device_budget=40MiB")) == end(chosen)
    # a run that began before the table goes on as it began, and one that began with it does without the file
    m.run("early", "--resume")
    assert end(early) == end(first) and "products: " not in found(early)
    late = m.run("late", "--max-steps", 1)
    # of another GPU, they do not hold
    other = m.run("other", env={"MT_EMU_NAME": "another GPU"})
    assert end(other) == end(first)
    with open(m.file(), "w") as f:
        f.write(table.replace("/2/", "/x/"))
    text = megatrain("run", first + ".ini", "--force", env={**m.env, **TWO}, expect=None)
    assert text.returncode and "products-host-emulation" in text.stderr and "remove it" in text.stderr, text.stderr
    os.remove(m.file())
    m.run("late", "--resume")
    assert end(late) == end(chosen) and found(late) == found(chosen)
    # what is not clearly faster is not chosen
    assert set(parts_of(m.measure("first", FIRST_IS_FASTER))) == {1}

    # an algorithm that does not start is not taken: the next one is, whatever the placement
    refusing = Machine(tmp, "refusing")
    second = refusing.run("second", env={"MT_EMU_ALGORITHMS": "x,0"})
    assert end(second) != end(first)
    placed = refusing.run("second-placed", "--set", "device.cpu_threads=1", "--set", "memory.device_budget=40MiB",
                          env={"MT_EMU_ALGORITHMS": "x,0"})
    assert end(placed) == end(second)
    megatrain("-q", "probe", "all", "--force", "--brief", "--threads", 2, env=refusing.env)
    assert set(parts_of(refusing.measure("second", {"MT_EMU_ALGORITHMS": "x,0"}))) == {2}
    text = megatrain("run", second + ".ini", "--force", env={**m.env, "MT_EMU_ALGORITHMS": "x,x"}, expect=None)
    assert text.returncode and "cuBLASLt: CUBLAS_STATUS_EXECUTION_FAILED for D[" in text.stderr, text.stderr
