# SPDX-License-Identifier: Apache-2.0
"""Bad input: each case must end with its exit code and say what is wrong, without touching anything."""
import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile

from tiny import BINARY, base, config, megatrain, read_safetensors, write_data, write_ini, write_model, write_safetensors

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
FAILED = []
RUN = []


def check(name, args, code, *words, env=None, limit=None):
    RUN.append(name)
    e = dict(os.environ)
    e.update(env or {})
    p = subprocess.run([BINARY, *(a if isinstance(a, bytes) else str(a) for a in args)], capture_output=True, text=True, env=e,
                       preexec_fn=limit)
    said = p.stdout + p.stderr
    missing = [w for w in words if w not in said]
    if p.returncode != code or missing:
        FAILED.append(name)
        print(f"FAIL {name}: exit {p.returncode} (expected {code}), missing {missing}:\n{said[-600:]}")
    return said


def safetensors(path, header, data=b"", length=None):
    h = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h) if length is None else length) + h + data)


def write_shards(folder, n):
    """A model of n files, with a tensor in each."""
    os.mkdir(folder)
    for i in range(n):
        safetensors(os.path.join(folder, f"{i}.safetensors"), {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"0")
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(n)}}, f)
    return folder


def config_cases(tmp, model, data):
    def ini(text=None, **over):
        path = os.path.join(tmp, "c.ini")
        if text is None:
            write_ini(path, base(model, data, os.path.join(tmp, "o-cfg"), **over))
        else:
            open(path, "w").write(text)
        return path

    run = lambda p, *more: ["-q", "run", p, "--dry-run", *more]
    check("unknown key", run(ini("[train]\nlearing_rate = 1\n")), 2, "c.ini:2", "learing_rate", 'did you mean "learning_rate"')
    check("unknown section", run(ini("[trian]\nsteps = 1\n")), 2, "c.ini:2", 'did you mean "train"')
    check("wrong type", run(ini("[train]\nsteps = soon\n")), 2, "c.ini:2", "train.steps", "whole number")
    check("missing unit", run(ini("[memory]\ndevice_budget = 20\n")), 2, "c.ini:2", "unit")
    check("duplicate key", run(ini("[train]\nsteps = 1\nsteps = 2\n")), 2, "c.ini:3", "twice", "line 2")
    check("duplicate section", run(ini("[train]\nsteps = 1\n[data]\n[train]\n")), 2, "c.ini:4", "duplicate section")
    check("undefined variable", run(ini("[model]\npath = ${NO_SUCH_VARIABLE}\n")), 2, "c.ini:2", "NO_SUCH_VARIABLE")
    check("key before section", run(ini("steps = 1\n")), 2, "c.ini:1", "section")
    check("no equals sign", run(ini("[train]\nsteps\n")), 2, "c.ini:2")
    check("bad choice", run(ini("[train]\nschedule = cosin\n")), 2, "constant|linear|cosine|wsd")
    check("out of range", run(ini("[train]\nmin_lr_ratio = 2\n")), 2, "between 0 and 1")
    check("open quote", run(ini('[model]\npath = "abc\n')), 2, "c.ini:2", "quote")
    check("missing include", run(ini("include = nowhere.ini\n")), 2, "c.ini:1", "nowhere.ini")
    check("include circle", run(ini("include = c.ini\n")), 2, "include itself")
    check("no such home", run(ini(memory__states="device")), 2, "must be one of auto|host|disk")
    check("disk without folders", run(ini(memory__states="disk")), 2, "memory.states", "memory.nvme_paths")
    check("spill without folders", run(ini(memory__activations="disk")), 2, "memory.activations", "memory.nvme_paths")
    check("no such GPU", run(ini(device__kind="cuda", device__index=900)), 5, "device.kind = cpu")
    for keys, what in ((dict(train__schedule="wsd", train__decay=11), "never comes down"), (dict(model__share_layers=2, train__delink_at=10), "train.delink_at")):
        check("steps that never come", ["run", ini(**keys), "--dry-run"], 0, what, "steps of a run of 10")
    check("warm-up without end", ["run", ini(train__warmup=10), "--dry-run"], 0, "never reaches its peak")
    check("steps and epochs", run(ini(train__epochs=1)), 2, "exactly one of", "train.steps")
    check("adapters without a kind", run(ini(adapter__rank=4)), 2, "adapter.rank", "adapter.kind = none")
    check("packing what is trained", run(ini(model__base_dtype="nf4")), 2, "model.base_dtype = nf4 packs nothing", "adapter.kind")
    check("patience without evaluations", run(ini(eval__early_stop_patience=2, data__eval="")), 2, "early_stop_patience", "data.eval")
    check("patience with one evaluation", run(ini(eval__early_stop_patience=2, data__eval="10%", eval__every=0)), 2, "eval.every")
    check("no batch size", run(ini(train__batch_size="")), 2, "exactly one of", "tokens_per_step")
    check("ragged tokens per step", run(ini(train__batch_size="", train__tokens_per_step=100)), 2, "64 and 128")
    check("bad --set", run(ini(), "--set", "train.stepz=1"), 2, "--set", "stepz")
    check("malformed --set", run(ini(), "--set", "nonsense"), 2, "SECTION.KEY=VALUE")
    check("no such config", run(os.path.join(tmp, "none.ini")), 2, "none.ini")
    check("freeze matches nothing", run(ini(model__freeze="nothing.*")), 2, "matches no tensor")
    check("freeze everything", run(ini(model__freeze="*")), 2, "nothing to train")
    check("template for a model that is not there", ["config", "init", "--model", "nosuch"], 0, '"nosuch": no such folder')
    check("unknown command", ["trian"], 2, "unknown command")
    check("unknown option", ["run", "--fast", "x.ini"], 2, "--fast")
    check("no operand", ["run"], 2, "usage")


def output_cases(tmp, model, data):
    """`check` tries the output folder, and leaves it as it was."""
    def ini(out):
        return write_ini(os.path.join(tmp, "out.ini"), base(model, data, out, train__steps=1))
    parent = os.path.join(tmp, "made")
    check("checked folder", ["check", ini(os.path.join(parent, "by/check"))], 0, "ok")
    assert not os.path.exists(parent)
    os.mkdir(parent)
    check("checked folder that is there", ["check", ini(parent)], 0, "ok")
    assert set(os.listdir(parent)) <= {".lock"}, os.listdir(parent)
    check("output where nothing can be made", ["check", ini("/proc/none/out")], 1, "/proc/none")
    check("output that is a file", ["check", ini(data)], 2, "name a folder")


def model_cases(tmp, data):
    def run(cfg, weights=None, name="m"):
        d = os.path.join(tmp, name)
        shutil.rmtree(d, ignore_errors=True)
        write_model(d, cfg)
        if weights:
            weights(d)
        path = write_ini(os.path.join(tmp, "m.ini"), base(d, data, os.path.join(tmp, "o-model"),
                         model__init="weights" if weights else "random"))
        return ["-q", "run", path, "--force"]

    c = config("llama")
    refused = {
        "architecture": ({**c, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        "mixture of experts": ({**c, "num_local_experts": 8}, "num_local_experts"),
        "remote code": ({**c, "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        "quantised": ({**c, "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        "vision": ({**c, "vision_config": {}}, "vision_config"),
        "rope type": ({**c, "rope_scaling": {"rope_type": "mrope", "factor": 2}}, "mrope"),
        "activation": ({**c, "hidden_act": "relu"}, "hidden_act"),
        "dropout": ({**c, "attention_dropout": 0.1}, "attention_dropout"),
        "softcap": ({**c, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        "layers": ({**c, "num_hidden_layers": 5000}, "num_hidden_layers\" must be an integer between"),
        "missing size": ({k: v for k, v in c.items() if k != "hidden_size"}, "hidden_size"),
        "heads": ({**c, "num_key_value_heads": 3}, "num_key_value_heads"),
    }
    for name, (cfg, word) in refused.items():
        check(f"model: {name}", run(cfg), 3, word)
    indexed = config("glm_moe_dsa", q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
                     n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, index_topk=63)
    beyond = ("may have 64 tokens", "index_topk = 63", "at most 63")
    args = run(indexed)
    check("documents beyond an indexer's choice", args, 2, *beyond)
    check("a plan of them", ["plan", *[a for a in args if a.endswith(".ini")], "--machine", "rtx4090"], 2, *beyond)
    d = os.path.join(tmp, "m")
    args = run(c)
    open(os.path.join(d, "config.json"), "w").write('{"a": 1,\n "b": }')
    check("broken config.json", args, 3, "config.json:2:")
    open(os.path.join(d, "config.json"), "w").write(json.dumps(c)[:-1] + ', "rope_parameters": {"rope_type": "linear", "factor": 2, "factor": 4}}')
    check("a key with two values", args, 3, "config.json", '"factor" is there twice')
    os.remove(os.path.join(d, "config.json"))
    check("no config.json", args, 3, "config.json")
    open(os.path.join(d, "m.gguf"), "w").close()
    check("a folder of GGUF", args, 3, "get the model that they were made from")
    ini = write_ini(os.path.join(tmp, "file.ini"), base(os.path.join(d, "m.gguf"), data, os.path.join(tmp, "o")))
    check("a file of GGUF", ["-q", "run", ini], 3, "m.gguf", "is a file: name a folder")
    ini = write_ini(os.path.join(tmp, "hub.ini"), base("someone/some-model", data, os.path.join(tmp, "o")))
    check("not in the cache", ["-q", "run", ini], 3, "hf download someone/some-model", env={"HF_HOME": tmp})

    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    files = {
        "no weights": (lambda d: None, "model.safetensors"),
        "pytorch only": (lambda d: open(os.path.join(d, "pytorch_model.bin"), "w").close(), "convert"),
        "shards alone": (lambda d: [open(f"{d}/model-0000{i}-of-00002.safetensors", "w").close() for i in (2, 1)],
                         "model-00001-of-00002.safetensors, but neither"),
        "a link to nothing": (lambda d: os.symlink("../../blobs/0", d + "/model.safetensors"), "model.safetensors is a link to a file that is not there"),
        "a pointer of git-lfs": (lambda d: open(d + "/model.safetensors", "w").write(POINTER), "model.safetensors is only git-lfs's pointer"),
        "an index that is one": (lambda d: open(d + "/model.safetensors.index.json", "w").write(POINTER), "index.json is only git-lfs's pointer"),
        "too short": (lambda d: open(os.path.join(d, "model.safetensors"), "wb").write(b"abc"), "too short"),
        "header length lies": (lambda d: safetensors(d + "/model.safetensors", {"a": one}, bytes(8), 1 << 60), "truncated"),
        "truncated data": (lambda d: safetensors(d + "/model.safetensors", {"a": one}, bytes(4)), "truncated"),
        "trailing bytes": (lambda d: safetensors(d + "/model.safetensors", {"a": one}, bytes(9)), "after the last"),
        "overlap": (lambda d: safetensors(d + "/model.safetensors", {"a": one, "b": one}, bytes(8)), "overlaps"),
        "hole": (lambda d: safetensors(d + "/model.safetensors", {"a": {**one, "data_offsets": [4, 12]}}, bytes(12)), "hole"),
        "shape lies": (lambda d: safetensors(d + "/model.safetensors", {"a": {**one, "shape": [3]}}, bytes(8)), "do not fit"),
        "shape overflows": (lambda d: safetensors(d + "/model.safetensors", {"a": {**one, "shape": [1 << 40, 1 << 40]}}, bytes(8)), "shape"),
        "negative shape": (lambda d: safetensors(d + "/model.safetensors", {"a": {**one, "shape": [-2]}}, bytes(8)), "shape"),
        "unknown dtype": (lambda d: safetensors(d + "/model.safetensors", {"a": {**one, "dtype": "F4"}}, bytes(8)), "F4"),
        "twice": (lambda d: safetensors(d + "/model.safetensors", b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "twice"),
        "not JSON": (lambda d: safetensors(d + "/model.safetensors", b"{nonsense}"), "JSON"),
        "tensor missing": (lambda d: safetensors(d + "/model.safetensors", {"a": one}, bytes(8)), "missing"),
        "index escapes": (lambda d: json.dump({"weight_map": {"a": "../x.safetensors"}}, open(d + "/model.safetensors.index.json", "w")), "names no file"),
        "shard missing": (lambda d: json.dump({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, open(d + "/model.safetensors.index.json", "w")), "model-00001-of-00002"),
    }
    for name, (make, word) in files.items():
        check(f"weights: {name}", run(c, make), 3, word)


def weight_value_cases(tmp, data):
    model = write_model(os.path.join(tmp, "wv"), config("llama", num_hidden_layers=1))
    out = os.path.join(tmp, "wv-out")
    ini = write_ini(os.path.join(tmp, "wv.ini"), base(model, data, out, train__steps=1))
    megatrain("-q", "run", ini)
    good = os.path.join(tmp, "wv-good")
    megatrain("export", os.path.join(out, "latest"), good, "--dtype", "f32")
    shutil.rmtree(os.path.join(good, "megatrain"))  # the checksums, which would be wrong first
    path = os.path.join(good, "model.safetensors")
    # a second set of weights beside the ones of an index: told by all that reads it, unless the index names that file itself
    two, index = os.path.join(tmp, "two"), os.path.join(tmp, "two", "model.safetensors.index.json")
    os.makedirs(two)
    shutil.copy(os.path.join(good, "config.json"), two)
    for name in "model.safetensors", "other.safetensors":
        shutil.copy(path, os.path.join(two, name))
    ini = write_ini(os.path.join(tmp, "two.ini"), base(two, data, os.path.join(tmp, "two-out"), model__init="weights", train__steps=1))
    for name, word in (("other.safetensors", True), ("model.safetensors", False)):
        json.dump({"weight_map": dict.fromkeys(read_safetensors(path), name)}, open(index, "w"))
        for i, args in enumerate((("run", ini, "--force"), ("export", two, f"{two}-{name}"), ("sample", two, "--prompt", "a", "--max-tokens", "1"))):
            said = megatrain(*args).stderr
            assert (f"{two} has two sets of weights" in said) == word == ("transformers" in said), (args, said)
    raw = bytearray(open(path, "rb").read())
    ini = write_ini(os.path.join(tmp, "wv2.ini"), base(good, data, os.path.join(tmp, "wv-out2"), model__init="weights"))
    for name, value in (("NaN", float("nan")), ("infinite", float("inf")), ("too large", 3.3999e38)):
        bad = bytearray(raw)
        bad[-8:-4] = struct.pack("<f", value)
        open(path, "wb").write(bad)
        check(f"weights hold {name}", ["-q", "run", ini, "--force"], 3, "element", "finite")
    bad = bytearray(raw)
    bad[-8:-4] = struct.pack("<f", 3e38)
    open(path, "wb").write(bad)
    check("weights that overflow", ["-q", "run", ini, "--force"], 6, "5 steps in a row", "there is no checkpoint of this run")
    for steps, say in ((3, "every step of this call was skipped"), (5, "the rate is not the cause")):
        check(f"{steps} steps that overflow", ["-q", "run", ini, "--force", "--set", f"train.steps={steps}"], 6, say)
        assert not [d for d in os.listdir(os.path.join(tmp, "wv-out2")) if d.startswith("checkpoint")], "nothing was trained"
    check("a loss that overflows", ["eval", ini, "--set", f"data.eval={data}"], 6, "the loss on data.eval is not finite", "--per-sample")
    check("a score that overflows", ["score", ini, "--data", data, "--out", os.path.join(tmp, "wv.scores")], 6, "data.jsonl:22: its log-probability is not finite")
    open(path, "wb").write(raw[:-256] + 64 * struct.pack("<f", 3e38))
    check("a text that overflows", ["sample", "--model", good, "--prompt", "a"], 6, "logits of text 0 are not finite")
    open(path, "wb").write(raw)
    evaluate = ["eval", ini, "--set", f"data.eval={data}"]
    untied = megatrain(*evaluate).stdout
    write_model(good, config("llama", num_hidden_layers=1, tie_word_embeddings=True))
    assert megatrain(*evaluate).stdout == untied
    check("a head of their own beside tied embeddings", evaluate, 0, "lm_head.weight differs from the embedding, so that it is used")
    tensors = read_safetensors(path)
    write_safetensors(path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    check("the embedding again beside tied embeddings", ["run", ini, "--force"], 0, "lm_head.weight is ignored, the embeddings are tied")
    write_model(good, config("qwen3_moe", num_hidden_layers=1, num_experts=2, tie_word_embeddings=True))
    megatrain("-q", "run", ini, "--force", "--set", "model.init=random", "--set", "checkpoint.save=weights")
    tensors = read_safetensors(os.path.join(tmp, "wv-out2", "latest", "model.safetensors"))
    table = tensors["model.embed_tokens.weight"]
    other = {"model.a.mtp.embed_tokens.weight": tensors["model.norm.weight"]}  # of a part that is not computed
    write_safetensors(path, {**other, **tensors, "lm_head.weight": table})
    check("another embedding beside them", ["run", ini, "--force"], 0, "lm_head.weight is ignored, the embeddings are tied")


def data_cases(tmp, model):
    def run(name, text, **over):
        path = os.path.join(tmp, name)
        open(path, "w", encoding="utf-8").write(text)
        over.setdefault("data__eval", "")
        return ["-q", "run", write_ini(os.path.join(tmp, "d.ini"),
                base(model, path, os.path.join(tmp, "o-data"), **over)), "--force"]

    line = json.dumps({"input_ids": [1, 2, 3]}) + "\n"
    check("data: broken JSON", run("a.jsonl", line + '{"input_ids": [1,}\n'), 3, "a.jsonl:2:")
    check("data: token beyond", run("a.jsonl", '{"input_ids": [1, 272]}\n'), 3, "a.jsonl:1", "272", "vocab_size")
    check("data: a pointer of git-lfs", run("a.txt", POINTER, data__tokenizer="byte"), 3, "a.txt is only git-lfs's pointer")
    check("data: negative token", run("a.jsonl", '{"input_ids": [1, -1]}\n'), 3, "a.jsonl:1")
    check("data: fraction", run("a.jsonl", '{"input_ids": [1, 2.5]}\n'), 3, "input_ids[1]")
    check("data: labels length", run("a.jsonl", '{"input_ids": [1, 2], "labels": [1]}\n'), 3, "differ in length")
    check("data: labels differ", run("a.jsonl", '{"input_ids": [1, 2], "labels": [-100, 3]}\n'), 3, "labels[1]")
    check("data: nothing trained", run("a.jsonl", '{"input_ids": [1, 2], "labels": [-100, -100]}\n'), 3, "no sample has a token")
    none = '{"input_ids": [1, 2], "labels": [-100, -100]}\n'
    check("data: many untrained", run("a.jsonl", line * 40 + none * 4), 3, "a.jsonl:41", "4 of 44", "data.max_untrained")
    check("data: empty", run("a.jsonl", ""), 3, "the files of data.train hold no samples")
    empty = os.path.join(tmp, "a.jsonl")
    check("data: empty to evaluate on", run("b.jsonl", '{"input_ids": [1, 2, 3]}\n', data__eval=empty), 3, "data.eval hold no samples")
    check("no folder for token shards", run("c.jsonl", '{"input_ids": [1, 2]}\n', data__eval="", data__cache_dir="/proc/none/here"), 1,
          "/proc/none", "data.cache_dir")
    check("a folder for token shards that is not for writing", run("c.jsonl", '{"input_ids": [1, 2]}\n', data__eval="", data__cache_dir="/sys"),
          1, "cannot write /sys/", "data.cache_dir")
    check("data: over-long", run("a.jsonl", line + json.dumps({"input_ids": [1] * 99}) + "\n"), 3, "a.jsonl:2", "overlong")
    check("data: unknown format", run("a.jsonl", '{"stuff": 1}\n'), 3, "data.format")
    check("data: chat without a tokenizer", run("a.jsonl", '{"messages": []}\n'), 3, "tokenizer.json", "data.tokenizer")
    check("data: not an object", run("a.jsonl", "[1, 2]\n"), 3, "object")
    check("data: an answer of another name", run("a.jsonl", '{"prompt": "a", "response": "b"}\n', data__tokenizer="byte"), 3, "a.jsonl:1",
          'no "completion"', "data.columns = completion:")
    check("data: a folder as teacher", run("a.jsonl", line, train__objective="distill", distill__teacher=model), 1, "distill.teacher", "it is a folder")
    check("data: lone surrogate", run("a.jsonl", '{"text": "\\ud800"}\n', data__tokenizer="byte"), 3, "a.jsonl:1")
    check("data: text without a tokenizer", run("a.txt", "hello there"), 3, "tokenizer.json", "data.tokenizer")
    check("data: not compressed", run("a.jsonl.gz", "x", data__tokenizer="byte"), 3, "a.jsonl.gz", "cannot read")
    check("data: no such file", run("a.jsonl", line, data__train=os.path.join(tmp, "none*.jsonl")), 3, "no file matches")
    check("data: eval larger than data", run("a.jsonl", line, data__eval="5"), 2, "data.eval")
    small = write_model(os.path.join(tmp, "small-vocab"), config("llama", vocab_size=200))
    check("data: vocabulary too small", run("a.txt", "hello there", data__tokenizer="byte", model__path=small), 3, "vocab_size")


def machine_cases(tmp, model, data):
    out = os.path.join(tmp, "full-dir")
    os.makedirs(out)
    open(os.path.join(out, "something"), "w").close()
    ini = write_ini(os.path.join(tmp, "x.ini"), base(model, data, out))
    unmeasured = write_ini(os.path.join(tmp, "rates.ini"), base(model, data, os.path.join(tmp, "o-rates")))
    nothing = {"XDG_CACHE_HOME": os.path.join(tmp, "empty"), "HOME": os.path.join(tmp, "empty")}
    check("rates without a profile", ["-q", "run", unmeasured, "--rates", os.path.join(tmp, "rates.json")], 1, "probe all", env=nothing)
    sweep = write_ini(os.path.join(tmp, "sweep.ini"), {**base(model, data, os.path.join(tmp, "o-sweep")),
                                                       "sweep": {"repeat": 1, "steps": 1, "warmup_steps": 0}})
    check("predictions asked for without a profile", ["bench", sweep, "--measure"], 1, "probe all", env=nothing)
    check("a sweep without predictions", ["bench", sweep, "--force"], 0, "no predictions", "probe all", env=nothing)
    check("and the folder is as it was", ["-q", "run", unmeasured], 0)
    check("output not empty", ["-q", "run", ini], 2, "not empty", "--resume", "--force")
    assert os.path.exists(os.path.join(out, "something"))
    ini = write_ini(os.path.join(tmp, "x.ini"), base(model, data, os.path.join(tmp, "o1"), memory__device_budget="100KiB"))
    check("device budget", ["-q", "run", ini], 4, "device budget", "at least")
    check("what else would fit is not known", ["-q", "plan", ini], 4, "No lean setting makes it fit", "probe all", env=nothing)
    ini = write_ini(os.path.join(tmp, "x.ini"), base(model, data, os.path.join(tmp, "o2"), memory__host_budget="1MiB"))
    said = check("host budget", ["-q", "run", ini], 4, "will not fit", "memory.host_budget", "short")
    wanted, allowed, gap = (float(x) for x in re.findall(r"([\d.]+) MiB", said))
    assert allowed == 1 and abs(wanted - allowed - gap) < 0.02, said
    ini = write_ini(os.path.join(tmp, "x.ini"), base(model, data, "/proc/nowhere/out"))
    check("output cannot be made", ["-q", "run", ini], 1, "/proc/nowhere")
    check("a path that is too long", ["-q", "run", ini, "--out", os.path.join(tmp, *["d" * 200] * 20)], 1, "cannot create")
    shutil.rmtree(os.path.join(tmp, "d" * 200), ignore_errors=True)
    ini = write_ini(os.path.join(tmp, "x.ini"), base(model, data, os.path.join(tmp, "o3")))
    cap = lambda: resource.setrlimit(resource.RLIMIT_AS, (330 << 20, 330 << 20))
    if "asan" not in BINARY and "tsan" not in BINARY:
        check("address space", ["-q", "run", ini, "--set", "memory.device_budget=400MiB"], 4, limit=cap)
        small = lambda most: lambda: resource.setrlimit(resource.RLIMIT_STACK, (64 << 10, most))
        check("a small stack", ["-q", "run", ini], 4, "the stack is limited to 64 KiB", "ulimit -s", limit=small(64 << 10))
        check("a small stack that may grow", ["-q", "run", ini], 0, limit=small(resource.RLIM_INFINITY))
        shutil.rmtree(os.path.join(tmp, "o3"))
    shards = write_shards(os.path.join(tmp, "shards"), 60)
    check("a trace that cannot be written", ["-q", "run", ini, "--trace", os.path.join(tmp, "no", "where.json")], 1, "where.json")
    short = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))
    check("smaller files than checkpoints have", ["-q", "run", ini], 4, "ulimit -f allows 195.31 KiB", "checkpoint.shard_size", limit=short)
    few = lambda most: lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))
    check("more files than may be open", ["inspect", shards], 3, "Too many open files", "ulimit -n", limit=few(40))
    for most in range(6, 16, 2):  # whichever file is the last
        p = subprocess.run([BINARY, "-q", "run", ini, "--set", "checkpoint.dir=" + os.path.join(tmp, f"o-{most}")], capture_output=True, text=True,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)))
        assert p.returncode in (0, 127) or "ulimit -n" in p.stderr, (most, p.stderr)
    check("more files than are usual", ["inspect", shards], 0, "60 tensors", limit=few(100))
    check("export over a folder", ["export", model, tmp], 2, "exists already")
    check("verify what is no checkpoint", ["verify", model], 7, "no training state")
    check("resume from nowhere", ["-q", "run", ini, "--resume=" + tmp], 7)


def option_cases(tmp, model, data):
    """Values of options are checked before anything is done."""
    ini = write_ini(os.path.join(tmp, "opt.ini"), base(model, data, os.path.join(tmp, "o-opt")))
    for option, values, words in (
            ("--max-steps", ("abc", "-1", "2.5", "3x", "0", ""), "whole number of 1 or more"),
            ("--tbw", ("600", "-1TB", "lots"), "size with a unit")):
        for v in values:
            check(f"run {option} {v}", ["run", ini, option, v], 2, option, words)
    for option, values in (("--max-tokens", ("-900", "-1", "1e3x", "abc", "99999999999")), ("--temperature", ("nan", "-1", "abc")),
                           ("--seed", ("abc", "-1"))):
        for v in values:
            check(f"sample {option} {v}", ["sample", "--model", model, option, v], 2, option, "must be")
    check("data show --samples", ["data", "show", ini, "--samples", "abc"], 2, "--samples")
    check("data show --first", ["data", "show", ini, "--first", "-5"], 2, "--first")
    for option, v in (("--seconds", "abc"), ("--depth", "0"), ("--size", "0"), ("--request", "1KB"), ("--threads", "abc"), ("--threads", "0"),
                      ("--index", "x")):
        check(f"probe {option} {v}", ["probe", "disk" if option not in ("--threads", "--index") else "all", option, v], 2, option)
    check("probe a folder that is not there", ["probe", "disk", "/nosuch"], 2, "/nosuch is not a folder")
    check("one operand too many", ["run", ini, "--resume", "out/checkpoint-5"], 2, "one argument too many", "--resume=out/checkpoint-5")
    check("unknown global option", ["--bogus"], 2, '"--bogus"', limit=None)
    check("a global option's value before the command", ["--color", "never", "config", "keys"], 0, "model.path")
    for key, value, words in (("checkpoint.dir", "~/out", "${HOME}/out"), ("train.seed", "3 # my run", "begins with ;"), ("train.warmup", "0.03", "a share such as 3%"),
                              ("data.eval", "0.1", "a share is written 10%"), ("checkpoint.dir", data, "is a file: name a folder")):
        check(f"{key} = {value}", ["check", write_ini(os.path.join(tmp, "said.ini"), base(model, data, os.path.join(tmp, "said"), **{key.replace(".", "__"): value}))], 2, words)
    check("a prompt that is not UTF-8", ["sample", "--model", model, "--prompt", b"ab\xff"], 2, "byte 3 of --prompt is not UTF-8")
    sets = [a for i in range(100) for a in ("--set", f"train.steps={i + 1}")]
    check("a hundred --set options", ["config", "show", ini, *sets], 0, "steps = 100")
    check("short options in the manual page", ["help", "--man"], 0, ".B \\-q, \\-\\-quiet", ".B \\-V, \\-\\-version")
    check("markdown cells", ["config", "keys", "--markdown"], 0, "One of `auto`, `bf16`, `f32`.")
    with open("/dev/full", "w") as full:
        for args in (["config", "keys"], ["config", "init"]):
            assert subprocess.run([BINARY, *args], stdout=full, stderr=subprocess.DEVNULL).returncode == 1, args
    p = subprocess.run([BINARY, "run", ini, "--log-format", "json"], capture_output=True, text=True)
    records = [json.loads(line) for line in p.stderr.splitlines()]
    assert p.returncode == 0 and all("time" in r and "level" in r for r in records)
    assert [r["step"] for r in records if r.get("event") == "step"] == list(range(1, 11))
    p = subprocess.run([BINARY, "--log-format", "json", "run", "nosuch.ini"], capture_output=True, text=True)
    assert p.returncode == 2 and json.loads(p.stderr)["level"] == "error", p.stderr


# The least value of options, where it is not 1, and not 0 as the help says
LEAST = {"generate": 2, "size": 4096, "request": 4096, **dict.fromkeys(("data samples", "max-tokens", "top-p", "noise", "layer", "seconds"), 0)}


def refusal(command, *args):
    """What a command says of too many arguments, which is said last: that the options are good."""
    p = subprocess.run([BINARY, command, *args, *(f"x{i}" for i in range(70))], capture_output=True, text=True)
    assert p.returncode == 2, (command, args, p)
    return p.stderr


def option_table_cases():
    """Each command's row and each option's, as the manual page has them."""
    page = megatrain("help", "--man").stdout
    commands, rest = re.search(r"\n\.SH COMMANDS\n(.*?)\n\.SH GLOBAL OPTIONS\n(.*?)\n\.SH ", page, re.S).groups()
    option = re.compile(r"\.TP\n\.B (?:\\-(.), )?\\-\\-([a-z]+(?:-[a-z]+)*)(?: (\S+)|\[=[A-Za-z]+\])?\n(\w.*)[.)]")
    assert page.replace("\n", "").isprintable(), "the manual page has bytes that are no text"
    assert "".join(m[1] or "" for m in map(option.fullmatch, re.split(r"\n(?=\.TP)", rest))) == "hVqv", rest
    for row in re.split(r"\n?\.SS ", commands)[1:]:
        (name, _, synopsis), *rows = row.split("\n")[0].partition(" "), *re.split(r"\n(?=\.TP)", row)[1:]
        found = [option.fullmatch(r) for r in rows]
        assert all(m and not m[1] for m in found) and len({m[2] for m in found}) == len(found), (name, rows)
        most = max(len([w for w in way.replace("[", "").split() if w[:2] != "--"]) for way in synopsis.split(" | "))
        assert "..." in synopsis or f'"x{most}" is one argument too many' in refusal(name), (name, synopsis)
        ends = [], []
        for _, of, value, text in (m.groups() for m in found if re.fullmatch("[A-Z]+", m[3] or "")):
            said = re.search(r"must be a (.*?),? (?:between (\S+) and (\S+)(?: bytes)?|of (\S+) or more), not", refusal(name, f"--{of}=x"))
            if not said:  # text
                continue
            low, unit = float(said[2] or said[4]), "B" * ("size" in said[1])
            least = LEAST.get(of, LEAST.get(f"{name} {of}", 0 if re.search(r"\b0\b", text.replace("0.", "")) else 1))
            usual = re.search(r"\(([\d.]+)\)", text)
            assert low == least and (not usual or low <= float(usual[1]) <= float(said[3] or "inf")), (name, of, said[0], text)
            ends[0].append(f"--{of}={said[2] or said[4]}{unit}")
            ends[1].append(f"--{of}={said[3] or 1 << 59}{unit}")
        for given in ends:
            assert "too many" in refusal(name, *given), (name, given, refusal(name, *given))


def help_cases():
    """A terminal is shown what the manual page has: commands, their options, topics, variables."""
    page, told = megatrain("help", "--man").stdout, megatrain("help").stdout
    sections = dict(s.partition("\n")[::2] for s in page.split("\n.SH ")[1:])
    rows = lambda text: [(m[1].replace("\\-", "-"), m[2]) for m in re.finditer(r"\.TP\n\.B (.*)\n(.*)", text)]
    lines = lambda of: [f"  {left if left[1] != '-' else '    ' + left:<28} {text}" for left, text in of]
    shared = lines(rows(sections["GLOBAL OPTIONS"]))
    for row in sections["COMMANDS"].split(".SS ")[1:]:
        (head, text), (name, _, synopsis) = row.split("\n")[:2], row.split("\n")[0].partition(" ")
        shown, own = megatrain("help", name).stdout.splitlines(), lines(rows(row))
        assert shown == [f"usage: megatrain {name} [OPTION]... {synopsis}", "", text, *["", "Options"] * bool(own), *own, "", "Global options", *shared], head
        assert f"  {name:<11} {text}" in told.splitlines(), name
    assert told.splitlines() == megatrain("--help").stdout.splitlines() and "\n".join(shared) in told, told
    topics = re.findall(r"^  (\S+)", told[told.index("help TOPIC"):], re.M)
    assert len(topics) > 8 and topics.pop() == "environment", topics
    for name in topics:
        shown, kept = megatrain("help", name).stdout, re.sub(r"^\.(PP|nf|fi)$", "", sections[name], flags=re.M).replace("\\e", "\\")
        assert shown.split() == kept.split() and max(len(l) for l in shown.splitlines() if l[:1] != " ") <= 78, name
        parts = re.split(r"^\.nf\n(.*?)^\.fi\n", sections[name] + "\n", flags=re.M | re.S)
        assert not any(re.search(r"^(?! ).", example, re.M) for example in parts[1::2]) and not re.search(r"^( |\.[nf])", "".join(parts[::2]), re.M), name
        assert shown.count("\n\n") == len(re.findall(r"^\.PP\n|(?<!\.PP\n)^\.nf\n", sections[name], re.M)) - 1 and shown[0] != "\n", name
    shown = megatrain("help", "environment").stdout.splitlines()
    assert [f"  {name:<22} {text}" for name, text in rows(sections["ENVIRONMENT"])] == [l for l in shown if l[:2] == "  "], shown
    for word, says in (("nothing", "no command, topic or key"), ("--man=nothing", "--man=policy")):
        assert says in megatrain("help", word, expect=2).stderr, word


def name_cases(tmp, model, data):
    """Folders that are called as something built in are do no harm."""
    d = os.path.join(tmp, "names")
    for name in ("model", "chatml", "qwen3", "10%", "rtx4090"):
        os.makedirs(os.path.join(d, name))
    p = subprocess.run([BINARY, "plan", "--machine", "rtx4090", "--model", os.path.join(model, "config.json")], cwd=d,
                       capture_output=True, text=True)
    assert p.returncode == 0 and "RTX 4090" in p.stdout, p.stderr
    alone = os.path.join(tmp, "alone", "megatrain")
    os.makedirs(os.path.dirname(alone))
    shutil.copy(BINARY, alone)
    p = subprocess.run([alone, "plan", "--machine", "rtx4090", "--model", os.path.join(model, "config.json")], capture_output=True, text=True)
    assert p.returncode == 2 and "there is no folder configs/machines near the program" in p.stderr, p.stderr
    shape = ["plan", "--machine", "rtx4090", "--model", os.path.join(model, "config.json")]
    check("plan --drives 1e9", [*shape, "--drives", "1e9"], 2, "--drives", "between")
    check("plan with hardly any memory", [*shape, "--host-mem", "1KB"], 4, "host budget of 900 B")
    check("plan --host-mem lots", [*shape, "--host-mem", "lots"], 2, "not an amount such as 24GiB")
    check("no such machine", ["plan", "--machine", "rtx1", "--model", os.path.join(model, "config.json")], 2, 'no machine "rtx1"')
    snapshot = os.path.join(tmp, "hub", "models--org--name", "snapshots", "abc")
    for folder in (snapshot, os.path.join(snapshot, "..", "..", "refs"), os.path.join(d, "org", "name")):
        os.makedirs(folder)
    shutil.copy(os.path.join(model, "config.json"), snapshot)
    open(os.path.join(tmp, "hub", "models--org--name", "refs", "main"), "w").write("abc")
    ini = write_ini(os.path.join(d, "hub.ini"), base("org/name", data, "o-hub", train__steps=1))
    p = subprocess.run([BINARY, "-q", "run", "hub.ini", "--dry-run"], cwd=d, capture_output=True, text=True,
                       env={**os.environ, "HF_HUB_CACHE": os.path.join(tmp, "hub")})
    assert p.returncode == 0, p.stderr
    ini = write_ini(os.path.join(d, "n.ini"), base(model, data, "o-names", data__eval="10%", data__template="model", train__steps=1))
    p = subprocess.run([BINARY, "-q", "run", "n.ini"], cwd=d, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    text = open(ini).read().replace("template = model", "template = chatml")
    open(ini, "w").write(text)
    said = subprocess.run([BINARY, "config", "show", "n.ini"], cwd=d, capture_output=True, text=True).stdout
    assert "template = chatml " in said and "eval = 10% " in said, said


def padding_cases(tmp, model):
    out = os.path.join(tmp, "o-pad")
    path = os.path.join(tmp, "padded.jsonl")
    def show(records):
        with open(path, "w") as f:
            f.write("\ufeff" + "".join(json.dumps(r) + "\n" for r in records))
        ini = write_ini(os.path.join(tmp, "pad.ini"), base(model, path, out, data__eval=""))
        return ["-q", "data", "show", ini, "--json"]
    said = megatrain(*show([{"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0]}] * 3)).stdout
    assert json.loads(said.splitlines()[0])["input_ids"] == [5, 6, 7], said
    check("a hole in attention_mask", show([{"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}]), 3, "padded.jsonl:1", "attention_mask")
    check("attention_mask of another length", show([{"input_ids": [5, 6, 7], "attention_mask": [1, 1]}]), 3, "differ in length")


def checkpoint_cases(tmp, model, data):
    out = os.path.join(tmp, "ck")
    ini = write_ini(os.path.join(tmp, "ck.ini"), base(model, data, out, train__steps=2))
    megatrain("-q", "run", ini)
    ck = os.path.join(out, "checkpoint-2")
    check("verify", ["verify", ck], 0, "match their checksums")
    names = [os.path.join(r, f) for r, _, fs in os.walk(ck) for f in fs]
    for path in names:
        good = open(path, "rb").read()
        for at in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[at] ^= 1
            open(path, "wb").write(bad)
            check(f"flipped byte {at} of {os.path.basename(path)}", ["verify", ck], 7)
        open(path, "wb").write(good[:-1])
        check(f"truncated {os.path.basename(path)}", ["verify", ck], 7)
        open(path, "wb").write(good)
    os.rename(names[0], names[0] + ".away")
    check("file missing", ["verify", ck], 7)
    os.rename(names[0] + ".away", names[0])
    check("verify again", ["verify", ck], 0)
    check("a run's folder instead of a checkpoint", ["verify", out], 7, "name one of its checkpoints", "/latest")
    longer = write_ini(os.path.join(tmp, "ck2.ini"), base(model, data, out, train__steps=3, train__learning_rate="2e-3"))
    check("resume with other settings", ["-q", "run", longer, "--resume"], 2, "train.learning_rate: 0.001 -> 0.002", "--force")
    os.symlink(tmp, os.path.join(tmp, "by-link"))
    again = write_ini(os.path.join(tmp, "ck4.ini"), base(os.path.join(tmp, "by-link", "model"),
                      os.path.join(tmp, "by-link", "data.jsonl"), out, train__steps=3))
    check("resume by another spelling of the same paths", ["-q", "run", again, "--resume"], 0)
    moved = shutil.copy(data, os.path.join(tmp, "moved.jsonl"))
    again = write_ini(os.path.join(tmp, "ck6.ini"), base(model, moved, out, train__steps=4))
    check("resume with data that were moved", ["run", again, "--resume"], 0, "data.train is elsewhere")
    again = write_ini(os.path.join(tmp, "ck7.ini"), base(model, moved, out, train__steps=4, train__seed=1, data__shuffle="off"))
    check("resume with moved data in another order", ["run", again, "--resume"], 2, "data.shuffle: on -> off", "come twice")
    os.unlink(os.path.join(out, "latest"))
    os.makedirs(os.path.join(out, "latest", "kept"))
    again = write_ini(os.path.join(tmp, "ck5.ini"), base(model, data, out, train__steps=5))
    check("latest is a folder", ["run", again, "--resume"], 0, "cannot link", "latest to checkpoint-5")
    assert os.listdir(os.path.join(out, "latest")) == ["kept"] and not os.path.lexists(os.path.join(out, "latest.tmp"))
    alone = write_ini(os.path.join(tmp, "ck6.ini"), base(model, "", out, data__eval=data, data__cache_dir=os.path.join(tmp, "cache")))
    check("eval without training data", ["eval", alone, "--model", ck], 0, "perplexity")
    check("training without training data", ["run", alone, "--dry-run"], 2, "data.train")
    check("a run's folder as a model", ["sample", "--model", os.path.dirname(ck), "--prompt", "a"], 3, "is the folder of a run", "latest")
    check("a run's folder to export", ["export", os.path.dirname(ck), os.path.join(tmp, "no")], 3, "is the folder of a run", "latest")
    check("a run's folder as adapters", ["eval", alone, "--adapter", os.path.dirname(ck)], 3, "is the folder of a run", "latest")
    check("no such folder to resume from", ["run", again, "--resume=" + os.path.join(tmp, "none")], 7, "no such folder")
    check("a model without a tokenizer", ["sample", "--model", ck, "--prompt", "ab", "--max-tokens", "1"], 0, "has no tokenizer: using the bytes")
    check("--max-tokens beyond reason", ["sample", "--model", ck, "--max-tokens", "999999999999"], 2, "between 0 and 16777216")
    other = write_data(os.path.join(tmp, "other.jsonl"), seed=5)
    changed = write_ini(os.path.join(tmp, "ck3.ini"), base(model, other, out, train__steps=3))
    check("resume with other data", ["-q", "run", changed, "--resume"], 2)


with tempfile.TemporaryDirectory() as tmp:
    model = write_model(os.path.join(tmp, "model"), config("qwen3", num_hidden_layers=2))
    data = write_data(os.path.join(tmp, "data.jsonl"), n=24)
    config_cases(tmp, model, data)
    output_cases(tmp, model, data)
    model_cases(tmp, data)
    weight_value_cases(tmp, data)
    data_cases(tmp, model)
    machine_cases(tmp, model, data)
    option_cases(tmp, model, data)
    option_table_cases()
    help_cases()
    name_cases(tmp, model, data)
    padding_cases(tmp, model)
    checkpoint_cases(tmp, model, data)
print(f"{len(RUN)} cases, {len(FAILED)} failed")
sys.exit(bool(FAILED))
