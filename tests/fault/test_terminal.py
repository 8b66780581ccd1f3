# SPDX-License-Identifier: Apache-2.0
"""
What is in files and in their names never steers a terminal, whichever command prints it: tensor names, data, templates'
errors, tokens, configurations, machines, sweeps, adapters, checkpoints' lists. What the program itself sends, colours,
and lines that it writes over, is known and taken out.
"""
import ctypes
import ctypes.util
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from runner import FinishedRun, run_tests  # noqa: E402
from tiny import BINARY, base, config, megatrain, write_ini  # noqa: E402

EVIL = "\x1b]0;owned\x07\x08\x7f\x9b31m\u202e"       # a title, and other ways to steer; the C1 one as UTF-8
OWN = re.compile(rb"\x1b\[[0-9;]*[mK]|\r")
STEERS = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|(?<![\x80-\xff])[\x80-\x9f]")


class Place(FinishedRun):
    def __init__(self, tmp):
        super().__init__(tmp, layers=1)
        self.n, self.shown = 0, 0

    def file(self, name, data):
        path = os.path.join(self.tmp, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode() if isinstance(data, str) else json.dumps(data).encode())
        return path

    def copy(self, name, of):
        to = os.path.join(self.tmp, name)
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(of, to, symlinks=True)
        return to

    def quiet(self, *cmd, shows=None):
        """Nothing that steers comes out; `shows`: whether the text does, made visible. Returns what came out."""
        said = on_a_terminal(*cmd)
        bad = STEERS.search(OWN.sub(b"", said))
        assert not bad, (cmd, bad, said)
        assert shows is None or (b"\\x1b]0;owned" in said) == shows, (cmd, said)
        self.n += 1
        self.shown += b"\\x1b]0;owned" in said
        return said


def on_a_terminal(*cmd):
    ours, theirs = pty.openpty()
    said = []

    def read():
        try:
            while part := os.read(ours, 65536):
                said.append(part)
        except OSError:  # EIO: the last one that had it open has closed it
            pass
    reader = threading.Thread(target=read)
    reader.start()
    subprocess.run([os.fsencode(c) if isinstance(c, str) else c for c in (BINARY, *map(str, cmd))], stdin=subprocess.DEVNULL,
                   stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "400"})
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(said)


def safetensors(names):
    header = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * len(names))


def what_steers_would_be_seen(p):
    for raw in ("\x1b]0;x\x07", "\x9b31m", "\u202e", "\x08"):
        assert STEERS.search(OWN.sub(b"", raw.encode())), raw
    assert STEERS.search(b"a\x9b31m") and not STEERS.search(OWN.sub(b"", "\x1b[31m\u00e9 \u4e2d\r\n\t".encode()))


def tensor_names(p):
    p.quiet("inspect", p.file("t/evil.safetensors", safetensors([EVIL, "b"])), shows=True)
    odd = p.copy("odd", p.model)
    shutil.copy(p.good + "/config.json", odd)
    p.file("odd/model.safetensors", safetensors([EVIL]))
    ini = write_ini(odd + ".ini", base(odd, p.data, odd + "-out", model__init="weights"))
    for cmd in (["inspect", odd], ["check", ini], ["plan", ini], ["run", ini], ["eval", ini], ["verify", odd],
                ["sample", "--model", odd, "--prompt", "a"], ["export", odd, odd + "-x"]):
        p.quiet(*cmd)
    p.file("odd/model.safetensors.index.json", {"weight_map": {EVIL: EVIL + ".safetensors"}})
    os.remove(odd + "/model.safetensors")
    for cmd in (["inspect", odd], ["check", ini], ["run", ini]):
        p.quiet(*cmd)


def model_configurations(p):
    for key in ("architectures", "model_type", "hidden_act", "torch_dtype", "quantization_config", "rope_scaling"):
        about = json.load(open(p.model + "/config.json"))
        about[key] = [EVIL] if key == "architectures" else {"quant_method": EVIL, "rope_type": EVIL} if "_" in key and key[-1] == "g" \
            else EVIL
        odd = p.copy("odd-config", p.model)
        p.file("odd-config/config.json", about)
        ini = write_ini(odd + ".ini", base(odd, p.data, odd + "-out"))
        for cmd in (["inspect", odd], ["check", ini], ["plan", ini], ["run", ini]):
            p.quiet(*cmd)
    p.quiet("inspect", p.copy("odd-config", p.model))
    p.file("odd-config/config.json", '{"' + EVIL + '": ')
    p.quiet("inspect", p.tmp + "/odd-config")


def data_of_all_kinds(p):
    rows = {"text": [{"text": EVIL}], "key": [{EVIL: 1}], "prompt": [{"prompt": EVIL, "completion": EVIL}],
            "role": [{"messages": [{"role": EVIL, "content": EVIL}]}], "from": [{"conversations": [{"from": EVIL, "value": EVIL}]}],
            "ids": [{"input_ids": [EVIL]}], "tools": [{"messages": [{"role": "user", "content": "x"}], "tools": EVIL}]}
    for name, lines in rows.items():
        data = p.file(f"data-{name}.jsonl", "".join(json.dumps(r) + "\n" for r in lines))
        ini = write_ini(data + ".ini", base(p.model, data, data + "-out", data__eval="", data__tokenizer="byte"))
        for cmd in (["check", ini], ["data", "show", ini], ["data", "stats", ini], ["run", ini], ["eval", ini, "--data", data]):
            p.quiet(*cmd, shows=True if name == "text" and cmd[1] == "show" else None)
    ini = write_ini(p.tmp + "/info.ini", base(p.model, p.file("dataset_info.json", {EVIL: {"hf_hub_url": EVIL}}), p.out + "-i"))
    p.quiet("data", "stats", ini)
    odd = p.file("odd.json", "{\"" + EVIL)
    p.quiet("data", "stats", write_ini(p.tmp + "/odd-json.ini", base(p.model, odd, p.out + "-i")))


def templates_and_tokenizers(p):
    """The helper's own messages pass through the program."""
    chat = p.file("chat.jsonl", json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": EVIL}]}) + "\n")
    model = p.copy("spoken", p.model)
    vocab = {chr(c): c for c in range(32, 127)} | {EVIL: 127, "[U]": 128}
    p.file("spoken/tokenizer.json", {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                                     "post_processor": None, "decoder": None, "truncation": None, "padding": None,
                                     "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[U]"}})
    for template in ("{{ raise_exception('" + EVIL + "') }}", "{% " + EVIL, "{{ messages[0]['" + EVIL + "'].x.y }}",
                     "{% for m in messages %}{{ m.content }}{% endfor %}"):
        p.file("spoken/tokenizer_config.json", {"chat_template": template, "eos_token": EVIL})
        ini = write_ini(model + ".ini", base(model, chat, model + "-out", data__eval=""))
        for cmd in (["check", ini], ["data", "show", ini], ["run", ini], ["sample", "--model", model, "--chat", "--prompt", "a"]):
            p.quiet(*cmd)
    p.file("spoken/tokenizer.json", "{\"" + EVIL)
    p.quiet("data", "show", ini)


def paths(p):
    odd = p.copy("m" + EVIL, p.good)
    raw = os.path.join(p.tmp, os.fsdecode(b"raw\x9b31m\xff"))
    shutil.copytree(odd, raw)
    data = os.path.join(p.tmp, EVIL + ".jsonl")
    shutil.copy(p.data, data)
    for folder in (odd, raw):
        ini = os.path.join(p.tmp, "paths.ini")
        with open(ini, "wb") as f:
            f.write(b"[model]\npath = " + os.fsencode(folder) + b"\ninit = weights\ndtype = f32\n[data]\ntrain = "
                    + os.fsencode(data) + b"\nseq_len = 64\ncache_dir = " + os.fsencode(p.tmp) + b"/cache\n[train]\nsteps = 1\n"
                    b"batch_size = 2\nmicro_batch = 1\n[memory]\ndevice_budget = 64MiB\n[checkpoint]\ndir = "
                    + os.fsencode(folder) + b"-out\n[device]\nkind = cpu\ncpu_threads = 1\n")
        for cmd in (["inspect", folder], ["verify", folder], ["check", ini], ["plan", ini], ["data", "show", ini],
                    ["data", "stats", ini], ["run", ini], ["run", ini], ["run", ini, "--resume"], ["report", folder + "-out"],
                    ["eval", ini, "--model", folder], ["sample", "--model", folder, "--prompt", "a", "--max-tokens", 1],
                    ["export", folder, folder + "-x"], ["export", folder, folder + "-x"], ["config", "show", ini],
                    ["run", folder + "/none.ini"], ["run", folder], ["bench", folder], ["report", folder]):
            p.quiet(*cmd)


def configurations(p):
    for text in (f"[{EVIL}]\nx = 1\n", f"[train]\n{EVIL} = 1\n", f"[train]\nsteps = {EVIL}\n", f"[train]\nschedule = {EVIL}\n",
                 f"include = {EVIL}\n", f"{EVIL}\n", f"[train]\nsteps = ${{{EVIL}}}\n", f"[adapter]\nkind = lora\nrank_pattern = {EVIL}\n"):
        ini = p.file("odd.ini", text)
        for cmd in (["check", ini], ["plan", ini], ["run", ini], ["config", "show", ini], ["bench", ini]):
            p.quiet(*cmd)
    p.quiet("run", p.ini, "--set", f"train.{EVIL}=1")
    p.quiet("config", "explain", EVIL)
    p.quiet(EVIL)
    p.quiet("run", "--" + EVIL)


def machines_and_sweeps(p):
    text = open(os.path.join(os.path.dirname(__file__), "..", "..", "configs", "machines", "h100.ini")).read()
    machine = p.file("machine.ini", re.sub(r"(?m)^name = .*$", lambda _: f"name = {EVIL}", text))
    p.quiet("plan", p.ini, "--machine", machine, shows=True)
    p.quiet("plan", p.ini, "--machine", EVIL)
    p.quiet("plan", p.ini, "--machine", p.file("machine-odd.ini", f"[{EVIL}]\n{EVIL} = {EVIL}\n"))
    sweep = write_ini(p.tmp + "/sweep.ini", {**base(p.model, p.data, p.tmp + "/x", train__steps=1),
                                             "sweep": {"repeat": 1, "warmup_steps": 0, "name": EVIL, EVIL: "1, 2",
                                                       "train.schedule": f"{EVIL}, linear"}})
    p.quiet("bench", sweep, "--predict-only")
    rows = [{"hash": EVIL, "job": EVIL, "axes": {EVIL: EVIL}, "status": EVIL, "tok_s": 5}] * 2
    p.file("swept/sweep.json", rows)
    p.file("swept-too/sweep.json", {"rows": rows, "jobs": rows, "name": EVIL})
    for cmd in (["report", p.tmp + "/swept"], ["report", p.tmp + "/swept-too"],
                ["bench", "--compare", p.tmp + "/swept", p.tmp + "/swept-too"]):
        p.quiet(*cmd)
    p.file("ran/run.json", {"name": EVIL, "model": EVIL, "device": EVIL})
    p.file("ran/metrics.jsonl", json.dumps({"step": 1, "loss": 2, EVIL: EVIL}) + "\n{" + EVIL)
    p.file("ran/trace.json", {"traceEvents": [{"name": EVIL, "ph": "X", "ts": 1, "dur": 2, "pid": 0, "tid": 0}]})
    p.quiet("report", p.tmp + "/ran")


def adapters(p):
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [EVIL], "base_model_name_or_path": EVIL,
             "bias": "none", "task_type": "CAUSAL_LM"}
    for change in ({}, {"target_modules": ["q_proj"]}, {"target_modules": ["q_proj"], "bias": EVIL}, {EVIL: EVIL},
                   {"peft_type": EVIL}, {"rank_pattern": {EVIL: 2}, "target_modules": ["q_proj"]},
                   {"modules_to_save": [EVIL], "target_modules": ["q_proj"]}):
        p.file("adapter/adapter_config.json", {**about, **change})
        p.file("adapter/adapter_model.safetensors", safetensors([EVIL, "base_model.model." + EVIL + ".lora_A.weight"]))
        folder = p.tmp + "/adapter"
        ini = write_ini(folder + ".ini", base(p.model, p.data, folder + "-out", model__init="weights", adapter__kind="lora",
                                              adapter__path=folder))
        for cmd in (["inspect", folder], ["check", ini], ["eval", p.ini, "--adapter", folder], ["verify", folder],
                    ["sample", "--model", p.good, "--adapter", folder, "--prompt", "a"],
                    ["export", "--merge", folder, folder + "-x"]):
            p.quiet(*cmd)


def lists_of_checkpoints(p):
    bad = p.copy("listed", p.good)
    name = bad + "/megatrain/state.json"
    state = json.load(open(name))
    for change in ({"files": {EVIL: {"size": 1, "xxh3": EVIL}}}, {"run": EVIL}, {"config": f"[{EVIL}]\n"}, {"step": EVIL},
                   {"device_findings": EVIL}, {"frozen": {EVIL: EVIL}}):
        with open(name, "w") as f:
            json.dump({**state, **change}, f)
        p.file("listed/megatrain/seal.json", sealed(name))
        for cmd in (["verify", bad], ["export", bad, bad + "-x"], ["run", p.ini, f"--resume={bad}", "--force"],
                    ["inspect", bad], ["eval", p.ini, "--model", bad]):
            p.quiet(*cmd)


def sealed(path):
    """The seal of a file, so that what is in it is read; without the library of sums it is only refused."""
    name = ctypes.util.find_library("xxhash")
    if not name:
        return json.dumps({EVIL: EVIL})
    xxh3 = ctypes.CDLL(name).XXH3_64bits
    xxh3.argtypes, xxh3.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
    text = open(path, "rb").read()
    one = "%016x" % xxh3(text, len(text))
    return '{\n\t"state.json":\t"%s",\n\t"seal.json":\t"%016x"\n}\n' % (one, xxh3(one.encode(), 16))


if __name__ == "__main__":
    run_tests(globals(), Place, lambda p: f"{p.n} commands, {p.shown} of them showed the text")
