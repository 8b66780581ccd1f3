#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's masters and Adam's moments for PyTorch's distributed trainers (FSDP2, torchtitan), and back. Needs torch, and back
also xxhash.
  to_dcp.py CHECKPOINT DIR              writes DIR, in the format of torch.distributed.checkpoint:
      "model": {name: FP32 weight}, "optim": {"state.<name>.exp_avg", ".exp_avg_sq", ".step", "param_groups.<name>.lr", ...}
    names are those of the model's files. To go on in torch, on any number of ranks:
      options = StateDictOptions(flatten_optimizer_state_dict=True)
      state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, adamw, options=options)}
      dcp.load(state, checkpoint_id=DIR)
      set_model_state_dict(model, state["model"]); set_optimizer_state_dict(model, adamw, state["optim"], options=options)
  to_dcp.py --back DIR CHECKPOINT OUT   copies CHECKPOINT, which DIR was written from, to OUT, with weights, moments and number of
    updates of DIR. Its place in the data stays. OUT is named like CHECKPOINT, in the folder of a new run:
      megatrain run run.ini --resume=OUT --set checkpoint.dir=FOLDER
Files are mapped, so that neither way needs memory for the model. What is frozen stays as it is."""
import configparser
import json
import mmap
import os
import re
import shutil
import struct
import sys

import torch
import torch.distributed.checkpoint as dcp

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MOMENTS = ("exp_avg", "exp_avg_sq")


def refuse(message):
    sys.exit("to_dcp.py: " + message)


class File:
    """A safetensors file, mapped: what is written to its tensors is written to it, if it was opened to be."""

    def __init__(self, path, write=False):
        with open(path, "r+b" if write else "rb") as f:
            self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY)
        self.path, (n,) = path, struct.unpack("<Q", self.map[:8])
        self.header, self.start = json.loads(self.map[8:8 + n]), 8 + n
        self.names = [name for name in self.header if name != "__metadata__"]

    def span(self, name):
        return [self.start + at for at in self.header[name]["data_offsets"]]

    def tensor(self, name):
        first, end = self.span(name)
        of = self.header[name]
        if of["dtype"] not in DTYPES:
            refuse(f"{self.path}: {name} is of {of['dtype']}, packed: only trained tensors can be taken to torch")
        count = (end - first) // DTYPES[of["dtype"]].itemsize
        return torch.frombuffer(self.map, dtype=DTYPES[of["dtype"]], count=count, offset=first).view(of["shape"])


class Checkpoint:
    def __init__(self, folder, write=False):
        path = os.path.join(folder, "megatrain", "state.json")
        if not os.path.exists(path):
            refuse(f"{folder} has no training state (megatrain/state.json): give a checkpoint that can be resumed")
        with open(path) as f:
            self.state = json.load(f)
        self.config = configparser.ConfigParser(interpolation=None, strict=False)
        self.config.read_string(self.state["config"])
        if self.config["optimizer"]["type"] != "adamw":
            refuse(f"{folder} was trained by optimizer.type = {self.config['optimizer']['type']}: only adamw's moments mean the same in torch")
        self.files = {name: File(os.path.join(folder, name), write) for name in self.state["files"] if name.endswith(".safetensors")}
        self.tensors = {}  # of training state, by their names: {"master": ..., "exp_avg": ..., "exp_avg_sq": ...}
        for name, file in self.files.items():
            for whole in file.names if name.startswith("megatrain/") else ():
                stem, _, part = whole.rpartition(".")
                self.tensors.setdefault(stem, {})[part] = file.tensor(whole)
        self.trained = [n for n, of in self.tensors.items() if MOMENTS[0] in of]
        missing = set(self.trained) - {n for _, file in self.weights() for n in file.names}
        if self.config["adapter"]["kind"] != "none" or missing:
            refuse(f"{folder}: {min(missing)} is not a tensor of the model's files (of an adapter, or of experts stored as one): torch knows none "
                   "of that name. Export the weights instead (megatrain export)")

    def weights(self):
        return [(name, file) for name, file in self.files.items() if not name.startswith("megatrain/")]

    def dict_for_torch(self, updates=None):
        """Views of the tensors, where they are FP32. updates: what tensors of steps begin with; by default as many as there were."""
        steps = {n: torch.tensor(float(self.state["updates"] if updates is None else updates)) for n in self.trained}
        optim = {f"state.{n}.{part}": self.tensors[n][part].float() for n in self.trained for part in MOMENTS}
        optim.update((f"state.{n}.step", step) for n, step in steps.items())
        return {"model": {n: of["master"].float() for n, of in self.tensors.items()}, "optim": optim}, steps

    def groups(self):
        """AdamW's keys of each trained tensor, those that this torch has."""
        keys, log = self.config["optimizer"], [row["lr"] for row in self.state["log_history"] if "lr" in row]
        usual = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
        own = {"lr": log[-1] if log else float(self.config["train"]["learning_rate"]), "eps": number(keys["eps"], 1e-8),
               "betas": (number(keys["beta1"], 0.9), number(keys["beta2"], 0.999))}
        return {f"param_groups.{n}.{key}": {**own, "weight_decay": self.decay(n)}.get(key, value)
                for n in self.trained for key, value in usual.items() if key != "params"}

    def decay(self, name):
        keys = self.config["optimizer"]
        none = "bias|norm" if keys.getboolean("decay_embeddings") else "bias|norm|embed|lm_head"
        return 0.0 if re.search(none, name) else float(keys["weight_decay"])


def number(text, auto):
    return auto if text == "auto" else float(text)


def forth(folder, out):
    c = Checkpoint(folder)
    state, _ = c.dict_for_torch()
    state["optim"].update(c.groups())
    dcp.save(state, checkpoint_id=out, no_dist=True)
    elsewhere = len(c.state.get("frozen", {}).get("tensors", {}))  # checkpoint.frozen = name
    print(f"{out}: {len(c.tensors)} tensors, {len(c.trained)} of them trained, after {c.state['updates']} updates"
          + (f"; {elsewhere} frozen ones are in the model's folder alone" if elsewhere else ""))


def round_weights(c):
    """The bf16 weights of the folder are the masters', rounded as the program does: half away from zero."""
    for _, file in c.weights():
        for name in set(file.names) & set(c.trained):
            bits = c.tensors[name]["master"].float().view(torch.int32)
            file.tensor(name).view(torch.int16).copy_((bits + 0x8000) >> 16)


def seal(c, folder):
    import xxhash

    def put(path, text):
        with open(os.path.join(folder, "megatrain", path), "w") as f:
            f.write(text)

    for name, file in c.files.items():
        of, sum_of = c.state["files"][name], lambda first, end, file=file: xxhash.xxh3_64_hexdigest(memoryview(file.map)[first:end])
        of["xxh3"] = sum_of(0, len(file.map))
        if "tensors" in of:
            of["tensors"] = {n: sum_of(*file.span(n)) for n in of["tensors"]}
        file.map.flush()
    text = json.dumps(c.state, indent="\t")
    sealed = xxhash.xxh3_64_hexdigest(text.encode())
    put("state.json", text)
    put("seal.json", f'{{\n\t"state.json":\t"{sealed}",\n\t"seal.json":\t"{xxhash.xxh3_64_hexdigest(sealed.encode())}"\n}}\n')


def back(source, folder, out):
    if os.path.exists(out):
        refuse(f"{out} exists")
    if os.path.basename(os.path.normpath(out)) != os.path.basename(os.path.realpath(folder)):
        refuse(f"{out} must be named {os.path.basename(os.path.realpath(folder))}: its place in the data stays")
    Checkpoint(folder)  # or it is refused
    shutil.copytree(folder, out)
    c = Checkpoint(out, write=True)
    state, steps = c.dict_for_torch(0)
    dcp.load(state, checkpoint_id=source, no_dist=True)
    for name, of in c.tensors.items():  # of other dtypes
        of["master"].copy_(state["model"][name])
        for part in MOMENTS if name in c.trained else ():
            of[part].copy_(state["optim"][f"state.{name}.{part}"])
    updates = {int(s.item()) for s in steps.values()}
    if len(updates) != 1:
        refuse(f"{source} has tensors of {sorted(updates)} updates: all must have as many")
    c.state["updates"] = str(updates.pop())
    round_weights(c)
    seal(c, out)
    print(f"{out}: {len(c.trained)} trained tensors after {c.state['updates']} updates; go on with megatrain run --resume={out}")


def main(args):
    if len(args) == 2 and not args[0].startswith("-"):
        forth(*args)
    elif len(args) == 4 and args[0] == "--back":
        back(*args[1:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
