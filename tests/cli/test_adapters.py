# SPDX-License-Identifier: Apache-2.0
"""Adapters: placement changes no bit, runs resume, the base is never written; and what cannot be is refused by name."""
import json
import os
import shutil
import sys
import tempfile

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))
from test_bits import smallest_budget
from tiny import base, config, fixture, losses, megatrain, metrics, part, planes, read_safetensors, with_weights, write_data, \
    write_ini, write_model

STEPS = 6
LORA = {"adapter__kind": "lora", "adapter__rank": 6, "adapter__rank_pattern": "v_proj:3, *.layers.1.mlp.*:9",
        "adapter__alpha": 9, "model__init": "weights", "train__learning_rate": "5e-3", "train__steps": STEPS}
RESIDENT = {"memory__adapters": "resident"}
PLACEMENTS = {
    "resident": {"memory__slots": 2, **RESIDENT},
    "keep": {"memory__activations": "keep"},
    "recompute": {"memory__activations": "recompute", "memory__slots": 2},
    "offload": {"memory__activations": "offload", **RESIDENT},
    "halves": {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute", **RESIDENT},
    "one thread": {"device__cpu_threads": 1},
    "eval and save at every step": {"eval__every": 1, "checkpoint__every": 1, **RESIDENT},
    "disk": {"memory__states": "disk"},
    "disk, halves": {"memory__states": "disk", "memory__unit": "half", "memory__slots": 2, **RESIDENT},
}

#: what PEFT 0.6 to 0.21 write if nobody asked for it, and what says only which modules have adapters
DEFAULTS = {
    "auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}, "peft_version": "0.21.2", "revision": "main", "inference_mode": False,
    "exclude_modules": ["lm_head"], "layers_to_transform": [0, 1, 2], "layers_pattern": "layers", "megatron_config": None,
    "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {}, "eva_config": None,
    "corda_config": None, "lora_ga_config": None, "velora_config": None, "alora_invocation_tokens": None, "use_qalora": False,
    "qalora_group_size": 16, "monteclora_config": None, "layer_replication": None, "lora_bias": False,
    "target_parameters": None, "use_bdlora": None, "arrow_config": None, "kasa_config": None, "ensure_weight_tying": True,
    "runtime_config": {"ephemeral_gpu_offload": False}, "fan_in_fan_out": False}

def run(tmp, name, model, data, env=None, args=(), steps=STEPS, **over):
    out = os.path.join(tmp, name.replace(" ", "-").replace(",", ""))
    ini = write_ini(out + ".ini", base(model, data, out, **{**LORA, **over}))
    megatrain("-q", "run", ini, *args, env=env)
    checkpoint = os.path.join(out, f"checkpoint-{steps}")
    return (losses(out), planes(checkpoint), read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))), out

def check_bits(tmp, model, data, dtype, also, **over):
    over = {**over, "model__dtype": dtype, "adapter__train_also": also}
    tag = f"{dtype} {len(also)}"
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    want, out = run(tmp, tag, model, data, **over)
    assert len(want[0]) == STEPS and want[0][-1][1] < want[0][0][1], want[0]
    for name, place in PLACEMENTS.items():
        if "disk" in name:
            place = {**place, "memory__nvme_paths": drive}
        env = {"MEGATRAIN_DISK_PIECE": "2048", "MEGATRAIN_POISON": "1"}
        got, _ = run(tmp, f"{tag} {name}", model, data, env=env, **over, **place)
        assert got == want, f"{tag}, {name}: another result"
    least = smallest_budget(tmp, base(model, data, os.path.join(tmp, "none"), **{**LORA, **over}))
    got, _ = run(tmp, f"{tag} little memory", model, data, env={"MEGATRAIN_POISON": "1"}, **over,
                 memory__device_budget=f"{least}KiB")
    assert got == want, f"{tag}, {least} KiB: another result"
    # killed after three steps and resumed elsewhere
    ini = write_ini(os.path.join(tmp, "first.ini"), base(model, data, os.path.join(tmp, f"{tag} resumed".replace(" ", "-")),
                                                         **{**LORA, **over, "checkpoint__every": 3}))
    megatrain("-q", "run", ini, "--max-steps", 3)
    got, _ = run(tmp, f"{tag} resumed", model, data, args=["--resume"], **over, memory__states="disk",
                 memory__nvme_paths=drive, memory__unit="half")
    assert got == want, f"{tag}: resumed to another result"
    return out

def check_files(tmp, model, data, out):
    """What is written: adapters alone, and what was trained whole, in FP32; no tensor of the base."""
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    names = read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))
    assert all(".lora_" in n or n == "base_model.model.model.norm.weight" for n in names), names
    assert all(v[0] == "F32" for v in names.values())
    assert not any(n.startswith("model") or n == "config.json" for n in os.listdir(checkpoint)), os.listdir(checkpoint)
    states = [n for f in os.listdir(os.path.join(checkpoint, "megatrain")) if f.startswith("state-")
              for n in read_safetensors(os.path.join(checkpoint, "megatrain", f))]
    assert len(states) == 3 * len(names), "master and moments of what is trained"
    written = [m.get("disk_write", {}) for m in metrics(out) if "loss" in m]
    assert not any(w.get("weights") for w in written)
    # the merged model is the model with its adapters
    eval_ini = write_ini(os.path.join(tmp, "eval.ini"), base(model, data, out + "-e", model__dtype="f32"))
    loss = lambda *a: json.loads(megatrain("-q", "eval", eval_ini, "--json", *a).stdout)["loss"]
    merged, plain = os.path.join(tmp, "merged"), os.path.join(tmp, "exported")
    megatrain("export", "--merge", "--dtype", "f32", checkpoint, merged)
    megatrain("export", checkpoint, plain)
    assert "export --merge" in megatrain("export", checkpoint, plain + "-packed", "--quantize", "nf4", expect=2).stderr
    with_adapter = loss("--adapter", checkpoint)
    assert loss("--adapter", plain) == with_adapter == loss("--model", checkpoint)
    assert abs(loss("--model", merged) / with_adapter - 1) < 1e-6 < abs(loss() / with_adapter - 1)
    for n, v in read_safetensors(os.path.join(plain, "adapter_model.safetensors")).items():
        assert v == names[n], n
    megatrain("verify", checkpoint)
    megatrain("verify", plain)
    said = megatrain("inspect", checkpoint).stdout
    assert "lora_A" in said and "v_proj: 3 modules, rank 3, alpha 9" in said and "up_proj: 3 modules, rank 6 to 9" in said, said
    assert said.startswith(f"LoRA of {model}: rank 6, alpha 9") and "model.norm: trained whole" in said, said
    assert said == megatrain("inspect", "--adapter", checkpoint).stdout == megatrain("inspect", model, "--adapter", checkpoint).stdout
    told = json.loads(megatrain("inspect", "--json", "--adapter", checkpoint).stdout)
    assert told["adapter"]["kind"] == "lora" and told["adapter"]["base_model"] == model and told["parameters"] == sum(
        len(v[2]) // 4 for v in names.values()), told["adapter"]
    assert {"module": "model.layers.1.mlp.up_proj", "rank": 9, "alpha": 9} in told["adapter"]["targets"]
    megatrain("inspect", expect=2)
    megatrain("check", eval_ini, "--adapter", checkpoint)
    megatrain("sample", "--model", checkpoint, "--prompt", "a", "--max-tokens", 0)
    shutil.rmtree(merged)

def check_dropout(tmp, model, data):
    """The mask goes by a token's place in the step, whatever its micro-batch; evaluation has none."""
    def train(name, **over):
        return run(tmp, f"dropout {name}", model, data, model__dtype="f32", adapter__dropout=0.5, **over)
    (want, _, _), out = train("two", train__micro_batch=2)
    for micro in (1, 4):
        (got, _, _), _ = train(str(micro), train__micro_batch=micro)
        for a, b in zip(got, want):
            assert abs(a[1] / b[1] - 1) < 1e-5 and abs(a[2] / b[2] - 1) < 1e-4, (micro, a, b)
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        assert json.load(f)["lora_dropout"] == 0.5
    ini = write_ini(os.path.join(tmp, "d.ini"), base(model, data, out + "-e", model__dtype="f32"))
    found = [json.loads(megatrain("-q", "eval", ini, "--json", "--adapter", checkpoint).stdout)["loss"] for _ in range(2)]
    plain = json.loads(megatrain("-q", "eval", ini, "--json").stdout)["loss"]
    assert found[0] == found[1] != plain, (found, plain)

def check_dora(tmp, model, data):
    """It begins as the model does: magnitudes are the lengths of the rows, in whatever home the base has."""
    (want, _, _), _ = run(tmp, "plain", model, data, model__dtype="f32", steps=2, train__steps=2)
    (got, state, weights), out = run(tmp, "dora", model, data, model__dtype="f32", steps=2, train__steps=2, adapter__kind="dora")
    assert abs(got[0][1] / want[0][1] - 1) < 1e-6 and got[1][1] != want[1][1], (got, want)
    names = [n for n in weights if n.endswith(".lora_magnitude_vector")]
    assert len(names) == 3 * 7 and all(len(weights[n][1]) == 1 for n in names), names
    disk = run(tmp, "dora disk", model, data, model__dtype="f32", steps=2, train__steps=2, adapter__kind="dora",
               memory__base="disk", memory__nvme_paths=os.path.join(tmp, "drive"))[0]
    assert disk == (got, state, weights)
    ini = write_ini(os.path.join(tmp, "dora.ini"), base(model, data, out + "-e", model__dtype="f32"))
    checkpoint, merged = os.path.join(out, "checkpoint-2"), os.path.join(tmp, "dora-merged")
    megatrain("export", "--merge", "--dtype", "f32", checkpoint, merged)
    loss = lambda *a: json.loads(megatrain("-q", "eval", ini, "--json", *a).stdout)["loss"]
    assert abs(loss("--model", merged) / loss("--adapter", checkpoint) - 1) < 1e-6

def mixture(tmp, name, data, family):
    seed = write_model(os.path.join(tmp, f"{name}-seed"), config(family, num_hidden_layers=2))
    return with_weights(tmp, seed, data, f"{name}-out")

def check_shared(tmp, data):
    """Mixtures: dense layers and shared experts have adapters, and by name routers and the gates of shared experts."""
    model = mixture(tmp, "moe", data, "qwen2_moe")
    over = {"adapter__rank_pattern": "shared_expert.up_proj:9", "adapter__dropout": 0.2,
            "adapter__targets": "all-linear, mlp.gate, shared_expert_gate"}
    for dtype in ("f32", "bf16"):
        want, out = run(tmp, f"moe {dtype}", model, data, model__dtype=dtype, **over)
        assert want[0][-1][1] < want[0][0][1], want[0]
        assert sum(".shared_expert.up_proj.lora_A" in n for n in want[2]) == 2 and not any(".experts." in n for n in want[2])
        for name, place in {"groups": {"memory__expert_group": 1, "memory__slots": 2, **RESIDENT}, "recompute": PLACEMENTS["recompute"],
                            "halves": {**PLACEMENTS["halves"], "device__cpu_threads": 1}}.items():
            got, _ = run(tmp, f"moe {dtype} {name}", model, data, env={"MEGATRAIN_POISON": "1"}, model__dtype=dtype,
                         **over, **place)
            assert got == want, f"{dtype}, {name}: another result"
    with open(os.path.join(out, f"checkpoint-{STEPS}", "adapter_config.json")) as f:
        c = json.load(f)
    assert "model.layers.1.mlp.shared_expert.up_proj.weight" in c["target_parameters"] and len(c["target_parameters"]) == 8
    assert sorted(c["target_modules"]) == ["k_proj", "o_proj", "q_proj", "shared_expert_gate", "v_proj"] and c["lora_dropout"] == 0
    assert c["rank_pattern"] == {"up_proj.weight": 9}, c["rank_pattern"]
    again = {k: v for k, v in LORA.items() if not k.startswith("adapter")}
    ini = write_ini(os.path.join(tmp, "again.ini"), base(model, data, os.path.join(tmp, "again"), **{**again,
        "adapter__kind": "lora", "adapter__path": os.path.join(out, f"checkpoint-{STEPS}")}))
    megatrain("-q", "check", ini)
    refused(tmp, model, data, "PEFT has no DoRA", adapter__kind="dora", adapter__rank_pattern="", adapter__targets="up_proj")
    refused(tmp, model, data, "shared_expert_gate", "adapter.kind = dora is not supported", adapter__kind="dora", adapter__rank_pattern="",
            adapter__targets="shared_expert_gate")
    return model

def check_experts(tmp, unread, data):
    """Routed experts and routers have adapters, by name: the same bits for every group and home; experts all or none."""
    model = mixture(tmp, "glm", data, "glm4_moe")
    over = {"adapter__targets": "q_proj, *.mlp.*_proj, mlp.gate", "adapter__rank_pattern": "", "adapter__lr_ratio_b": 4}
    drive = os.path.join(tmp, "drive")
    for dtype in ("f32", "bf16"):
        want, out = run(tmp, f"experts {dtype}", model, data, model__dtype=dtype, **over)
        assert want[0][-1][1] < want[0][0][1], want[0]
        assert sum(".experts." in n for n in want[2]) == 2 * 8 * 3 * 2
        for name, place in {"one": {"memory__expert_group": 1, "memory__slots": 2, **RESIDENT}, "three": {"memory__expert_group": 3},
                            "disk": {"memory__states": "disk", "memory__nvme_paths": drive, "memory__expert_group": 2, **RESIDENT},
                            "halves": {**PLACEMENTS["halves"], "device__cpu_threads": 1}}.items():
            got, _ = run(tmp, f"experts {dtype} {name}", model, data, env={"MEGATRAIN_POISON": "1"}, model__dtype=dtype,
                         **over, **place)
            assert got == want, f"experts, {dtype}, {name}: another result"
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        c = json.load(f)
    assert c["target_modules"] == ["q_proj", "gate_proj", "up_proj", "down_proj"] and len(c["target_parameters"]) == 8, c
    assert "model.layers.1.mlp.gate.weight" in c["target_parameters"] and sum(".mlp.gate.lora_" in n for n in want[2]) == 4
    ini = write_ini(os.path.join(tmp, "experts.ini"), base(model, data, out + "-e", model__dtype="f32"))
    merged = os.path.join(tmp, "experts-merged")
    megatrain("export", "--merge", "--dtype", "f32", checkpoint, merged)
    loss = lambda *a: json.loads(megatrain("-q", "eval", ini, "--json", *a).stdout)["loss"]
    assert abs(loss("--model", merged) / loss("--adapter", checkpoint) - 1) < 1e-6 < abs(loss() / loss("--model", merged) - 1)
    for bad in ({"adapter__targets": "gate_proj"}, {"adapter__targets": "*.layers.1.mlp.experts.*"},
                {"adapter__targets": "*.experts.7.*"}, {"adapter__targets": "*.experts.*.gate_proj, *.experts.*.up_proj"}, {"adapter__rank_pattern": "experts.0.up_proj:3"},
                {"adapter__dropout": 0.1}):
        refused(tmp, model, data, "adapters of all routed experts", **{**over, **bad})
    refused(tmp, model, data, "one by one or all together", **{**over, "adapter__targets": "*.experts.*.down_proj, experts.gate_up_proj"})
    check_joined(tmp, unread, data)
    refused(tmp, unread, data, "experts.0.gate_proj", "cannot have an adapter (PEFT 0.21 does not read", **over)
    gated = fixture("afmoe")
    refused(tmp, gated, data, "self_attn.gate_proj", "PEFT 0.21 refuses", **{**over, "adapter__targets": "self_attn.gate_proj"})
    plain = write_model(os.path.join(tmp, "no-sparse"), config("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1]))
    ini = write_ini(os.path.join(tmp, "no-sparse.ini"), base(plain, data, os.path.join(tmp, "no-sparse-out"), **{
        **LORA, "model__init": "random", "adapter__rank_pattern": "", "train__steps": 1}))
    megatrain("-q", "run", ini)  # of the family of a mixture, without a mixture in it
    renamed = write_model(os.path.join(tmp, "renamed"), config("mixtral", num_hidden_layers=2))
    refused(tmp, renamed, data, "adapters of all routed experts", "*.experts.*", model__init="random",
            **{**over, "adapter__targets": "q_proj, w1, w3"})
    refused(tmp, renamed, data, "block_sparse_moe.gate", "matches nothing", model__init="random",  # PEFT calls it mlp.gate
            **{**over, "adapter__targets": "block_sparse_moe.gate"})
    refused(tmp, renamed, data, "PEFT has no DoRA", model__init="random",
            **{**over, "adapter__targets": "*.experts.*", "adapter__kind": "dora"})

def check_joined(tmp, model, data):
    """The same experts, all together by the name that transformers gives their parameters."""
    over = {"adapter__targets": "q_proj, *.1.mlp.experts.gate_up_proj, experts.down_proj", "adapter__rank_pattern": "down_proj:5",
            "adapter__alpha_pattern": "gate_up_proj:4", "model__dtype": "f32"}
    want, out = run(tmp, "joined", model, data, **over)
    shapes = {k.split(".layers.")[1]: v[1] for k, v in want[2].items() if ".experts" in k}
    assert [len(shapes), shapes["0.mlp.experts.lora_B.weight"], shapes["1.mlp.experts.base_layer.lora_A.weight"]] == [
        6, [64, 8 * 5], [8 * 6, 64]], shapes
    assert want == run(tmp, "joined disk", model, data, memory__states="disk", memory__nvme_paths=os.path.join(tmp, "drive"),
                       memory__expert_group=3, **over)[0]
    checkpoint = os.path.join(out, f"checkpoint-{STEPS}")
    ini = write_ini(os.path.join(tmp, "joined.ini"), base(model, data, out + "-e", model__dtype="f32"))
    loss = lambda *a: json.loads(megatrain("-q", "eval", ini, "--json", *a).stdout)["loss"]
    merged = os.path.join(tmp, "joined-merged")
    megatrain("export", "--merge", "--dtype", "f32", checkpoint, merged)
    assert abs(loss("--model", merged) / loss("--adapter", checkpoint) - 1) < 1e-6 < abs(loss() / loss("--model", merged) - 1)

def check_whole(tmp, data):
    """Experts that files have in one tensor have adapters by its name: the same bits for every group and home, also on
    MXFP4; in layers of their own and of ranks of their own."""
    plain = mixture(tmp, "oss", data, "gpt_oss")
    packed = os.path.join(tmp, "oss-packed")
    megatrain("export", "--quantize", "mxfp4", plain, packed)
    over = {"adapter__targets": "q_proj, 0.mlp.experts.down_proj, *.1.mlp.experts.*", "adapter__rank_pattern": "gate_up_proj:9",
            "adapter__lr_ratio_b": 4}
    drive = {"memory__nvme_paths": os.path.join(tmp, "drive")}
    for model, dtype in ((plain, "f32"), (packed, "bf16")):
        name = os.path.basename(model) + dtype
        want, out = run(tmp, name, model, data, model__dtype=dtype, **over)
        assert want[0][-1][1] < want[0][0][1], want[0]
        shapes = {k.split(".layers.")[1]: v[1] for k, v in want[2].items() if ".experts" in k}
        assert [len(shapes), shapes["0.mlp.experts.lora_A.weight"], shapes["1.mlp.experts.base_layer.lora_B.weight"]] == [
            6, [8 * 6, 48], [2 * 48, 8 * 9]], shapes
        for place in ({"memory__expert_group": 1, "memory__slots": 2}, {"memory__expert_group": 3, **PLACEMENTS["halves"]},
                      {"memory__states": "disk", "memory__expert_group": 2, **drive}, {"memory__base": "files" if model == packed else "disk", **drive}):
            got, _ = run(tmp, f"{name} {len(place)} {sorted(place)[0]}", model, data, env={"MEGATRAIN_POISON": "1"},
                         model__dtype=dtype, **over, **place)
            assert got == want, f"{name}, {place}: another result"
        first = write_ini(os.path.join(tmp, "first.ini"), base(model, data, os.path.join(tmp, name + "-resumed"), **{
            **LORA, **over, "checkpoint__every": 3, "model__dtype": dtype}))
        megatrain("-q", "run", first, "--max-steps", 3)
        got, _ = run(tmp, f"{name} resumed", model, data, args=["--resume"], model__dtype=dtype, **over, memory__expert_group=1)
        assert got == want, f"{name}: resumed to another result"
        check_merged_whole(tmp, model, data, os.path.join(out, f"checkpoint-{STEPS}"))
    for more, say in (({"adapter__dropout": 0.1}, "no dropout in adapters of routed experts"),
                      ({"adapter__kind": "dora"}, "PEFT has no DoRA"), ({"adapter__targets": "experts.3.gate_proj"}, "matches nothing")):
        refused(tmp, plain, data, say, **{**over, **more})

def check_merged_whole(tmp, model, data, checkpoint):
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        c = json.load(f)
    assert c["target_parameters"] == ["model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj",
                                      "model.layers.1.mlp.experts.down_proj"] and c["target_modules"] == ["q_proj"], c
    assert c["rank_pattern"] == {"gate_up_proj": 9}, c
    ini = write_ini(os.path.join(tmp, "whole.ini"), base(model, data, os.path.join(tmp, "whole-e"), model__dtype="f32"))
    loss = lambda *a: json.loads(megatrain("-q", "eval", ini, "--json", *a).stdout)["loss"]
    want = loss("--adapter", checkpoint)
    for dtype, limit in (("f32", 1e-6), ("bf16", 1e-3)):
        merged = f"{checkpoint}-{dtype}"
        megatrain("export", "--merge", "--dtype", dtype, checkpoint, merged)
        assert abs(loss("--model", merged) / want - 1) < limit < abs(loss() / want - 1), dtype
        names = read_safetensors(os.path.join(merged, "model.safetensors"))
        assert names["model.layers.0.mlp.experts.gate_up_proj"][0] == dtype.upper() and not any("_blocks" in n for n in names)
    with open(os.path.join(merged, "config.json")) as f:
        assert "quantization_config" not in json.load(f)

def refused(tmp, model, data, *says, code=2, args=(), command="run", **over):
    ini = write_ini(os.path.join(tmp, "bad.ini"), base(model, data, os.path.join(tmp, "bad"), **{**LORA, **over}))
    p = megatrain("-q", command, ini, *args, expect=code)
    for say in says:
        assert say in p.stderr, p.stderr

def check_path(tmp, model, data, folder):
    """A run from a folder of adapters does not need the folder any more when it resumes."""
    start = os.path.join(tmp, "start")
    shutil.copytree(folder, start)
    over = {k: v for k, v in LORA.items() if "rank" not in k and "alpha" not in k}
    over.update(adapter__path=start, checkpoint__every=2)
    def ini(name):
        return write_ini(os.path.join(tmp, name + ".ini"), base(model, data, os.path.join(tmp, name), **over))
    megatrain("-q", "run", ini("path"))
    megatrain("-q", "run", ini("path-resumed"), "--max-steps", 2)
    shutil.rmtree(start)
    megatrain("-q", "run", ini("path-resumed"), "--resume")
    ends = [os.path.join(tmp, name) for name in ("path", "path-resumed")]
    assert losses(ends[0]) == losses(ends[1])
    a, b = (read_safetensors(os.path.join(e, f"checkpoint-{STEPS}", "adapter_model.safetensors")) for e in ends)
    assert a == b
    assert "start is not an adapter's folder" in megatrain("-q", "run", ini("path-gone"), expect=3).stderr

def check_base_named(tmp, model, data):
    """A folder of a model is named by its absolute path, wherever the run stood; what cannot be found says who names it."""
    moved = os.path.join(tmp, "moved")
    shutil.copytree(model, moved)
    write_ini(os.path.join(tmp, "named.ini"), base("moved", data, "named", **{**LORA, "train__steps": 1}))
    megatrain("-q", "run", "named.ini", cwd=tmp)
    checkpoint = os.path.join(tmp, "named", "checkpoint-1")
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        assert json.load(f)["base_model_name_or_path"] == moved
    megatrain("-q", "export", "--merge", checkpoint, os.path.join(tmp, "named-merged"), cwd="/")
    shutil.rmtree(moved)
    for args in (["export", "--merge", checkpoint, os.path.join(tmp, "m")], ["sample", "--model", checkpoint, "--prompt", "a"]):
        said = megatrain("-q", *args, expect=3).stderr
        assert moved in said and "adapter_config.json names it): give --model" in said, said

def turn_a_bit(path, ending):
    """In the middle of a tensor of the base; returns its name."""
    with open(path, "r+b") as f:
        n = int.from_bytes(f.read(8), "little")
        name, t = [(k, v) for k, v in json.loads(f.read(n)).items() if k.endswith(ending)][-1]
        f.seek(8 + n + sum(t["data_offsets"]) // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    return name

def check_refusals(tmp, model, data, checkpoint):
    refused(tmp, model, data, "lm_head", "adapter.kind = dora", adapter__kind="dora", adapter__targets="lm_head")
    refused(tmp, model, data, "adapter.dropout", "adapter.kind = dora", adapter__kind="dora", adapter__dropout="0.1")
    refused(tmp, model, data, "adapter.dropout", adapter__dropout="1")
    refused(tmp, model, data, "adapter.targets", "matches nothing", adapter__targets="qproj")
    refused(tmp, model, data, "adapter.rank_pattern", "NAME:RANK", adapter__rank_pattern="q_proj")
    refused(tmp, model, data, "model.freeze", model__freeze="model.norm.*")
    refused(tmp, model, data, "adapter.rank is set", "remove the key", adapter__path=checkpoint)
    ini = write_ini(os.path.join(tmp, "dora.ini"), base(model, data, os.path.join(tmp, "bad"), model__init="weights",
                                                        adapter__kind="dora", adapter__path=checkpoint))
    assert "adapter.kind must be lora" in megatrain("-q", "run", ini, expect=2).stderr
    folder = os.path.join(tmp, "peft")
    shutil.copytree(checkpoint, folder)
    shutil.rmtree(os.path.join(folder, "megatrain"))
    with open(os.path.join(folder, "adapter_config.json")) as f:
        good = json.load(f)

    def eval_with(expect=0, **keys):
        with open(os.path.join(folder, "adapter_config.json"), "w") as f:
            json.dump({**good, **keys}, f)
        ini = write_ini(os.path.join(tmp, "eval.ini"), base(model, data, os.path.join(tmp, "bad")))
        return megatrain("-q", "eval", ini, "--adapter", folder, expect=expect).stderr

    eval_with(**DEFAULTS)
    for key, value in (("fan_in_fan_out", True), ("lora_bias", True), ("bias", "all"),
                       ("layer_replication", [[0, 2]]), ("trainable_token_indices", [1]), ("init_lora_weights", "pissa"),
                       ("init_lora_weights", "olora"), ("init_lora_weights", "loftq"), ("init_lora_weights", "eva"),
                       ("init_lora_weights", "corda"), ("init_lora_weights", "lora_ga"), ("init_lora_weights", "pissa_niter_4"),
                       ("alora_invocation_tokens", [1, 2]), ("use_qalora", True), ("use_bdlora", {"nblocks": 2}),
                       ("arrow_config", {"top_k": 3}), ("velora_config", {"k": 1}), ("monteclora_config", {"n": 1}),
                       ("kasa_config", {"beta": 1}), ("megatron_config", {"x": 1}),
                       ("a_later_versions", "key"), ("peft_type", "IA3"), ("r", None), ("lora_alpha", "16"), ("rank_pattern", ["q_proj"]),
                       ("alpha_pattern", {"q_proj": "4"})):
        said = eval_with(expect=3, **{key: value})
        assert key in said and "adapter_config.json" in said, said
        assert ("merge_and_unload()" if key in ("bias", "peft_type") or "not supported" in said else "number") in said, said
    # another model's weights under the same name, and another model's adapter
    twin = os.path.join(tmp, "twin")
    shutil.copytree(model, twin)
    out = os.path.join(tmp, "rebased")
    ini = write_ini(os.path.join(tmp, "rebased.ini"), base(twin, data, out, **{**LORA, "checkpoint__every": 2}))
    megatrain("-q", "run", ini, "--max-steps", 2)
    shutil.rmtree(os.path.join(twin, "megatrain"), ignore_errors=True)
    turned = turn_a_bit(os.path.join(twin, "model.safetensors"), "mlp.down_proj.weight")
    said = megatrain("-q", "run", ini, "--resume", expect=3).stderr
    assert turned in said and "does not have the checksum in the checkpoint" in said, said
    megatrain("-q", "run", ini, "--resume", "--force")
    other = write_model(os.path.join(tmp, "other"), config("qwen2", hidden_size=32, num_hidden_layers=3))
    ini = write_ini(os.path.join(tmp, "other.ini"), base(other, data, os.path.join(tmp, "bad")))
    said = megatrain("-q", "check", ini, "--adapter", checkpoint, expect=3).stderr
    assert "another shape" in said, said
    mixture = os.path.join(tmp, "moe-out", "checkpoint-1")
    assert "are the adapters for another one" in megatrain("inspect", mixture, "--adapter", checkpoint, expect=3).stderr

def main():
    with tempfile.TemporaryDirectory() as tmp:
        data = write_data(os.path.join(tmp, "data.jsonl"))
        model = write_model(os.path.join(tmp, "seed"), config("qwen2", num_hidden_layers=3))
        model = with_weights(tmp, model, data, "seed-out")
        whole, out = run(tmp, "norm", model, data, adapter__train_also="model.norm")
        if part("first"):
            check_bits(tmp, model, data, "bf16", "", adapter__kind="dora")
            check_dropout(tmp, model, data)
            check_files(tmp, model, data, out)
            check_path(tmp, model, data, os.path.join(out, f"checkpoint-{STEPS}"))
            check_base_named(tmp, model, data)
        if part("rest"):
            check_bits(tmp, model, data, "f32", "model.norm, model.layers.0.input_layernorm", adapter__dropout=0.3)
            check_dora(tmp, model, data)
            check_experts(tmp, check_shared(tmp, data), data)
            check_whole(tmp, data)
            check_refusals(tmp, model, data, os.path.join(out, f"checkpoint-{STEPS}"))

main()
