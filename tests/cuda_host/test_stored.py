# SPDX-License-Identifier: Apache-2.0
"""A GPU that has not been measured is planned for with the stored machine of its name: on the emulated one, with the
program installed in a folder of its own."""
import json
import os
import shutil
import sys
import tempfile

TMP = tempfile.TemporaryDirectory()
PREFIX = TMP.name
STORED = os.path.join(PREFIX, "share", "megatrain", "machines")
HERE = os.path.dirname(os.path.abspath(__file__))
os.makedirs(os.path.join(PREFIX, "bin"))
shutil.copytree(os.path.join(HERE, "..", "..", "configs", "machines"), STORED)
os.environ["MEGATRAIN"] = shutil.copy(os.environ["MEGATRAIN"], os.path.join(PREFIX, "bin", "megatrain"))
sys.path.insert(0, os.path.join(HERE, "..", "cli"))
from tiny import base, config, megatrain, write_data, write_ini, write_model

ENV = {"XDG_CACHE_HOME": os.path.join(PREFIX, "cache"), "MEGATRAIN_PROBE_SMALL": "1", "MT_EMU_NAME": "NVIDIA GeForce RTX 4090"}


def plan(ini, *more, env=ENV):
    return json.loads(megatrain("-q", "plan", ini, "--json", *more, env=env).stdout)


def a_first_run_is_planned(ini):
    said = plan(ini)
    assert "RTX 4090" in said["machine"] and said["fits"], said
    text = megatrain("run", ini, "--set", "train.micro_batch=auto", env=ENV).stderr
    assert "s a step predicted" in text and "by the data sheet of NVIDIA GeForce RTX 4090" in text, text


def optimizer_seconds(ini, *more):
    said = plan(ini, "--set", "device.cpu_threads=1", *more)
    return next(r for r in said["resources"] if r["resource"] == "host optimizer")["busy_seconds"]


def the_host_is_this_one(ini):
    """One thread of a host of that one core has more memory traffic than a sixteenth of the stored host's."""
    here, there = optimizer_seconds(ini), optimizer_seconds(ini, "--machine", "rtx4090")
    assert here < 0.5 * there, (here, there)


def another_product_is_not_taken_for_it(ini):
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 40"):
        said = megatrain("plan", ini, env={**ENV, "MT_EMU_NAME": name}).stdout
        assert "Time      not measured: megatrain probe all" in said and "has not been measured" in said, (name, said)
    assert "predicted" not in megatrain("run", ini, "--force", env={**ENV, "MT_EMU_NAME": "NVIDIA T4"}).stderr


def a_stored_machine_is_no_profile_to_add_to(ini):
    said = megatrain("plan", ini, "--measure", env=ENV, expect=2).stderr
    assert "probe all first" in said, said
    assert not os.path.exists(os.path.join(PREFIX, "cache", "megatrain"))


def what_was_measured_comes_first(ini):
    megatrain("-q", "probe", "all", "--force", "--brief", "--device", "auto", "--threads", 2, env=ENV)
    megatrain("-q", "plan", ini, "--measure", env=ENV)
    assert "cuda 0 (NVIDIA GeForce RTX 4090" in plan(ini)["machine"]
    text = megatrain("run", ini, "--force", env=ENV).stderr
    assert "s a step predicted" in text and "data sheet" not in text, text
    text = megatrain("plan", ini, env={**ENV, "MT_EMU_CAPABILITY": "86"})
    assert "other hardware" in text.stderr and "(rated)" in text.stdout, (text.stderr, text.stdout)


def a_broken_file_is_named(ini):
    with open(os.path.join(STORED, "aaa.ini"), "w") as f:
        f.write("[machine]\nversion = 1\nkind = tpu\n")
    shutil.rmtree(ENV["XDG_CACHE_HOME"])
    said = megatrain("plan", ini, env=ENV, expect=2).stderr
    assert "aaa.ini:3" in said, said


model = write_model(os.path.join(PREFIX, "model"), config(num_hidden_layers=3))
data = write_data(os.path.join(PREFIX, "data.jsonl"))
ini = write_ini(os.path.join(PREFIX, "run.ini"), base(model, data, os.path.join(PREFIX, "out"), train__steps=2))
a_first_run_is_planned(ini)
the_host_is_this_one(ini)
another_product_is_not_taken_for_it(ini)
a_stored_machine_is_no_profile_to_add_to(ini)
what_was_measured_comes_first(ini)
a_broken_file_is_named(ini)
TMP.cleanup()
