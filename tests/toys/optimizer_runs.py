# SPDX-License-Identifier: Apache-2.0
"""optimizer_runs.py TYPE BYTES KEY=VALUE [STATE...]: a toy optimizer trains from memory and from a drive, is killed, and
goes on to the same bits. STATEs are the names of its states in checkpoints, of BYTES a parameter in all. Parameters of
the model begin at odd places, in the middle of a block. A key of the optimizer's own changes the result."""
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time

from tiny import BINARY, base, config, losses, megatrain, planes, read_safetensors, write_data, write_ini, write_model

TYPE, BYTES, KEY, STATES = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:]
STEPS = 12


def kill_and_resume(ini, out):
    p = subprocess.Popen([BINARY, "-q", "run", ini])
    while not os.path.isdir(f"{out}/checkpoint-3"):
        assert p.poll() is None, "the run ended before it was killed"
        time.sleep(0.002)
    p.kill()
    assert p.wait() < 0 and not os.path.isdir(f"{out}/checkpoint-{STEPS}")
    return megatrain("run", ini, "--resume").stderr


def state(tmp, step):
    out = {}
    for name in planes(f"{tmp}/whole/checkpoint-{step}"):
        out.update(read_safetensors(f"{tmp}/whole/checkpoint-{step}/megatrain/{name}"))
    return out


def check_blocks(tmp):
    """Each block is of one tensor: the last update is that of the momentum that its blocks have."""
    was, now = state(tmp, STEPS - 1), state(tmp, STEPS)
    with open(f"{tmp}/whole/metrics.jsonl") as f:
        rate = [m["lr"] for m in map(json.loads, f) if m.get("step") == STEPS and "lr" in m][0]
    for name in (n[:-7] for n in now if n.endswith(".master")):
        keep = 1 - 0.1 * rate if len(now[name + ".master"][1]) == 2 else 1
        w, v = (struct.unpack(f"<{len(t[2]) // 4}f", t[2]) for t in (was[name + ".master"], now[name + ".master"]))
        blocks = now[name + ".momentum8"][2]
        for i in range(len(w)):
            scale, = struct.unpack_from("<f", blocks, i // 32 * 36)
            code, = struct.unpack_from("<b", blocks, i // 32 * 36 + 4 + i % 32)
            off = abs(w[i] * keep - v[i] - rate * code * scale)
            assert off <= 0.51 * rate * scale + 2.5e-7 * abs(w[i]), (name, i, off, rate, scale)


def trained(tmp, name, model, data, over):
    out = f"{tmp}/{name}"
    ini = write_ini(out + ".ini", base(model, data, out, train__steps=STEPS, checkpoint__every=1, optimizer__type=TYPE,
                                       **over))
    said = kill_and_resume(ini, out) if name in ("killed", "disk") else megatrain("run", ini).stderr
    return said, (losses(out), planes(f"{out}/checkpoint-{STEPS}"))


def main(tmp):
    # of k, v and up, biases and matrices begin in the middle of a block, and rows of the embedding do
    model = write_model(f"{tmp}/model", config("qwen2", hidden_size=40, num_attention_heads=5, num_key_value_heads=1,
                                               intermediate_size=22))
    data, drive = write_data(f"{tmp}/data.jsonl"), f"{tmp}/drive"
    os.mkdir(drive)
    os.environ["MEGATRAIN_DISK_PIECE"] = "2048"
    key, value = KEY.split("=")
    variants = {"whole": {}, "killed": {}, "disk": {"memory__states": "disk", "memory__nvme_paths": drive},
                "halves": {"memory__unit": "half", "memory__embedding": "host", "device__cpu_threads": 1},
                "other": {f"optimizer__{key}": value}}
    got = {name: trained(tmp, name, model, data, over) for name, over in variants.items()}
    said, whole = got["whole"]
    rows = dict(re.findall(r"^  .{14}  (\S.*\S) {2,}(\d\S* \S+)$", said, re.M))
    assert not [r for r in rows if "moments" in r], said
    tensors = read_safetensors(f"{tmp}/whole/checkpoint-{STEPS}/megatrain/state-00001.safetensors")
    assert {t.rsplit(".", 1)[1] for t in tensors} == {"master", *STATES}, tensors.keys()
    sizes = {end: sum(len(t[2]) for name, t in tensors.items() if name.endswith("." + end)) for end in STATES}
    masters = sum(len(t[2]) for name, t in tensors.items() if name.endswith(".master"))
    per = 4 * sum(sizes.values()) / masters
    assert BYTES <= per <= BYTES * 1.2, (per, BYTES) # the last block of a tensor is not full
    first, last = whole[0][0][1], whole[0][-1][1]
    assert last < first, "nothing was learnt"
    for name in ("killed", "disk", "halves"):
        assert got[name][1] == whole, f"{name}: other bits"
    assert got["other"][1] != whole, f"optimizer.{KEY} changes nothing"
    if TYPE == "sgd8":
        check_blocks(tmp)
    print(f"ok {TYPE}: loss {first:.4f} to {last:.4f}, states of {per:.4g} bytes a parameter")


with tempfile.TemporaryDirectory() as tmp_:
    main(tmp_)
