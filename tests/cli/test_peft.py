# SPDX-License-Identifier: Apache-2.0
"""Folders of adapters as PEFT has them: modules that are trained whole, tied tables, packed bases; what it would not find
is refused."""
import json
import os
import re
import shutil
import struct
import sys
import tempfile

from test_packed import write_decoded
from tiny import (FAMILIES, base, chosen, config, losses, megatrain, read_safetensors, with_weights, write_data, write_ini, write_model,
                  write_safetensors)

LORA = {"adapter__kind": "lora", "adapter__rank": 4, "model__init": "weights", "train__learning_rate": "1e-2", "train__steps": 3}
PREFIX = "base_model.model."
FAMILIES["ernie4_5_moe"] = ("Ernie4_5_MoeForCausalLM", {
    "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0, "moe_layer_interval": 1,
    "moe_num_shared_experts": 1, "head_dim": 16, "use_bias": False})
FAMILIES["hy_v3"] = ("HYV3ForCausalLM", {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1, "head_dim": 16,
    "mlp_layer_types": ["sparse", "sparse"], "router_scaling_factor": 1.5})


def random_model(tmp, name, family, **over):
    """A model with weights: bf16, of two layers."""
    seed = write_model(os.path.join(tmp, name + "-seed"), config(family, num_hidden_layers=2, **over))
    data = write_data(os.path.join(tmp, "data.jsonl"))
    return with_weights(tmp, seed, data, name + "-made"), data


def train(tmp, name, model, data, expect=0, **over):
    """The checkpoint and its adapter's tensors; or what was said."""
    out = os.path.join(tmp, name)
    ini = write_ini(out + ".ini", base(model, data, out, **{**LORA, "model__dtype": "f32", **over}))
    p = megatrain("-q", "run", ini, "--force", expect=expect)
    checkpoint = os.path.join(out, f"checkpoint-{3}")
    return (checkpoint, read_safetensors(os.path.join(checkpoint, "adapter_model.safetensors"))) if not expect else p.stderr


def settings(checkpoint):
    with open(os.path.join(checkpoint, "adapter_config.json")) as f:
        return json.load(f)


def eval_loss(tmp, model, data, *args):
    ini = write_ini(os.path.join(tmp, "eval.ini"), base(model, data, os.path.join(tmp, "eval"), model__dtype="f32"))
    return json.loads(megatrain("-q", "eval", ini, "--json", *args).stdout)["loss"]


def check_reads_back(tmp, model, data, checkpoint):
    """--adapter, adapter.path and --merge take the folder as it is, and mean the same model."""
    merged = checkpoint + "-merged"
    megatrain("-q", "export", "--merge", "--dtype", "f32", checkpoint, merged)
    loss = eval_loss(tmp, model, data, "--adapter", checkpoint)
    assert abs(eval_loss(tmp, model, data, "--model", merged) / loss - 1) < 1e-6 < abs(eval_loss(tmp, model, data) / loss - 1)
    keys = {k: v for k, v in LORA.items() if k != "adapter__rank"}
    ini = write_ini(os.path.join(tmp, "again.ini"), base(model, data, os.path.join(tmp, "again"), **{**keys, "adapter__path": checkpoint}))
    megatrain("-q", "check", ini)


def modules_trained_whole_have_the_names_of_transformers(tmp):
    """With the buffers of the module, which PEFT wants, too."""
    for family, also, want in (
            ("glm4_moe", "mlp.gate", {"mlp.gate.weight": [8, 64], "mlp.gate.e_score_correction_bias": [8]}),
            ("ernie4_5_moe", "mlp.gate", {"mlp.gate.weight": [4, 64], "mlp.gate.moe_statics.e_score_correction_bias": [1, 4]}),
            ("mixtral", "mlp.gate", {"mlp.gate.weight": [8, 64]}),
            ("hy_v3", "mlp.gate, mlp.shared_experts.down_proj", {"mlp.gate.weight": [4, 64], "mlp.shared_experts.down_proj.weight": [64, 32]}),
            ("gpt_oss", "mlp.router", {"mlp.router.weight": [8, 64], "mlp.router.bias": [8]}),
            ("qwen2", "v_proj, 1.mlp.down_proj", {"mlp.down_proj.weight": [64, 88], "self_attn.v_proj.weight": [32, 64], "self_attn.v_proj.bias": [32]})):
        model, data = random_model(tmp, family, family)
        checkpoint, tensors = train(tmp, family, model, data, adapter__targets="q_proj", adapter__train_also=also)
        got = {n.split(".layers.1.")[1]: v[1] for n, v in tensors.items() if ".layers.1." in n and ".lora_" not in n}
        assert got == want, (family, got)
        saved = settings(checkpoint)["modules_to_save"]
        modules = sorted({n.rpartition(".")[0].removesuffix(".moe_statics") for n in want})
        assert sorted(m.split(".layers.1.")[1] for m in saved if ".layers.1." in m) == modules, (family, saved)
        check_reads_back(tmp, model, data, checkpoint)


def files_with_another_prefix_have_the_names_of_transformers(tmp):
    """NemotronH's files say "backbone." where transformers, and PEFT, say "model."."""
    with open(os.path.join(os.path.dirname(__file__), "..", "parity", "nemotron_h", "config.json")) as f:
        settings_of = {**json.load(f), "vocab_size": config("qwen2")["vocab_size"]}
    data = write_data(os.path.join(tmp, "data.jsonl"))
    model = with_weights(tmp, write_model(os.path.join(tmp, "prefix-seed"), settings_of), data, "prefix-made")
    assert "backbone.norm_f.weight" in read_safetensors(os.path.join(model, "model.safetensors"))
    checkpoint, tensors = train(tmp, "prefix", model, data, adapter__targets="in_proj", adapter__train_also="norm_f")
    assert tensors[PREFIX + "model.norm_f.weight"][1] == [settings_of["hidden_size"]]
    assert settings(checkpoint)["modules_to_save"] == ["model.norm_f"]
    check_reads_back(tmp, model, data, checkpoint)


def what_peft_would_not_find_is_refused(tmp):
    qwen, data = random_model(tmp, "moe", "qwen3_moe")
    said = train(tmp, "no", qwen, data, expect=2, adapter__targets="q_proj", adapter__train_also="*.experts.*")
    assert "routed experts cannot be trained whole" in said and "experts.gate_up_proj" in said, said
    said = train(tmp, "no", qwen, data, expect=2, adapter__targets="*.experts.*", adapter__rslora="on")
    assert "rslora" in said and "experts.gate_up_proj" in said, said
    oss, _ = random_model(tmp, "oss", "gpt_oss")
    said = train(tmp, "no", oss, data, expect=2, adapter__targets="q_proj", adapter__train_also="*.self_attn")
    assert "self_attn.sinks, which is not a module by itself" in said, said
    # the same of a folder, whoever wrote it
    checkpoint, tensors = train(tmp, "single", qwen, data, adapter__targets="*.experts.*")
    folder = os.path.join(tmp, "single-rs")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("megatrain"))
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({**settings(checkpoint), "use_rslora": True}, f)
    for args in (["export", "--merge", folder, os.path.join(tmp, "merged-rs")],
                 ["check", os.path.join(tmp, "single.ini"), "--adapter", folder]):
        said = megatrain("-q", *args, expect=2).stderr
        assert "rslora" in said, said
    name = PREFIX + "model.layers.0.mlp.experts.gate_up_proj"
    write_safetensors(os.path.join(folder, "adapter_model.safetensors"), {name: ("F32", [1], b"0000"), **tensors})
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({**settings(checkpoint), "modules_to_save": ["mlp.experts"]}, f)
    said = megatrain("-q", "check", os.path.join(tmp, "single.ini"), "--adapter", folder, expect=3).stderr
    assert "modules_to_save" in said and "target_parameters" not in said, said
    dora = {"adapter__kind": "dora", "model__dtype": "f32"}
    _, tensors = train(tmp, "dora-moe", qwen, data, **dora)  # all-linear: attention, which is what PEFT has DoRA for
    assert sorted({n.split(".")[-2] for n in tensors if n.endswith("magnitude_vector")}) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def a_tied_table_is_one(tmp):
    model, data = random_model(tmp, "tied", "qwen3", tie_word_embeddings=True)
    checkpoint, tensors = train(tmp, "table", model, data, adapter__train_also="lm_head, embed_tokens")
    assert settings(checkpoint)["ensure_weight_tying"] is True
    check_reads_back(tmp, model, data, checkpoint)
    plain, _ = train(tmp, "no-table", model, data)
    assert "ensure_weight_tying" not in settings(plain)
    resaved = os.path.join(tmp, "resaved")  # as PEFT writes it: it lists one name, and has the table under both
    shutil.copytree(checkpoint, resaved, ignore=shutil.ignore_patterns("megatrain"))
    with open(os.path.join(resaved, "adapter_config.json"), "w") as f:
        json.dump({**settings(checkpoint), "modules_to_save": ["model.embed_tokens"]}, f)
    assert eval_loss(tmp, model, data, "--adapter", resaved) == eval_loss(tmp, model, data, "--adapter", checkpoint)
    two = os.path.join(tmp, "two")
    shutil.copytree(checkpoint, two, ignore=shutil.ignore_patterns("megatrain"))
    dtype, shape, raw = tensors[PREFIX + "lm_head.weight"]
    tensors[PREFIX + "lm_head.weight"] = dtype, shape, raw[:-4] + struct.pack("<f", 0.25)
    write_safetensors(os.path.join(two, "adapter_model.safetensors"), tensors)
    ini = write_ini(os.path.join(tmp, "two.ini"), base(model, data, os.path.join(tmp, "two-out"), **{
        k: v for k, v in LORA.items() if k != "adapter__rank"}, adapter__path=two))
    for args in (["export", "--merge", two, two + "-merged"], ["run", ini], ["check", os.path.join(tmp, "eval.ini"), "--adapter", two],
                 ["eval", os.path.join(tmp, "eval.ini"), "--adapter", two]):
        said = megatrain("-q", *args, expect=3).stderr
        assert "are two tables that differ" in said and "ensure_weight_tying" in said, said


def a_copy_of_the_head_that_differs_is_warned_of(tmp):
    """PEFT keeps the model's own head beside an adapter of it, and would load it over the model's."""
    for tied in (False, True):
        model, data = random_model(tmp, f"head-{tied}", "qwen3", tie_word_embeddings=tied)
        checkpoint, tensors = train(tmp, f"head-{tied}-lora", model, data, adapter__targets="q_proj" if tied else "q_proj, lm_head")
        weights = read_safetensors(os.path.join(model, "model.safetensors"))
        dtype, shape, raw = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        ini = write_ini(os.path.join(tmp, "e.ini"), base(model, data, os.path.join(tmp, "e"), model__dtype="f32"))
        same = megatrain("-q", "eval", ini, "--json", "--adapter", checkpoint).stdout
        for change, words in ((b"", []), (b"\x00\x40", ["lm_head.base_layer.weight", "adapter's copy over the model's"])):
            folder = os.path.join(tmp, f"head-{tied}-{len(change)}")
            shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("megatrain"))
            copy = {**tensors, PREFIX + "lm_head.base_layer.weight": (dtype, shape, raw[:len(raw) - len(change)] + change)}
            write_safetensors(os.path.join(folder, "adapter_model.safetensors"), copy)
            p = megatrain("eval", ini, "--json", "--adapter", folder)
            assert p.stdout == same and all(w in p.stderr for w in words) and ("base_layer" in p.stderr) == bool(words), p.stderr
            merged = megatrain("export", folder, folder + "-merged", "--merge", "--model", model)
            assert all(w in merged.stderr for w in words) and ("base_layer" in merged.stderr) == bool(words), merged.stderr


def what_rounding_leaves_of_an_adapter_is_said(tmp):
    """A model in bf16 has 8 bits of a weight: of a small update, some or most is rounded away."""
    model, data = random_model(tmp, "rounded", "qwen3")
    checkpoint, _ = train(tmp, "rounded-lora", model, data, adapter__targets="q_proj, down_proj", train__learning_rate="2e-3")
    said = {d: megatrain("export", "--merge", "--dtype", d, checkpoint, f"{checkpoint}-{d}").stderr for d in ("bf16", "f32")}
    assert "rounded" not in said["f32"] and "is left in bf16" not in said["f32"], said
    kept, error = (float(x) for x in re.search(r"adds?, (\S+)% is left in bf16, with an error of (\S+)% of its norm", said["bf16"]).groups())
    widened = lambda raw: b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
    values = lambda v: struct.unpack(f"<{len(v[2]) // (4 if v[0] == 'F32' else 2)}f", v[2] if v[0] == "F32" else widened(v[2]))
    read = lambda folder: {n: values(v) for n, v in read_safetensors(os.path.join(folder, "model.safetensors")).items()
                           if "q_proj" in n or "down_proj" in n}
    update = along = lost = 0
    before, exact, rounded = read(model), read(checkpoint + "-f32"), read(checkpoint + "-bf16")
    for n in before:
        for b, x, r in zip(before[n], exact[n], rounded[n]):
            update, along, lost = update + (x - b) ** 2, along + (r - b) * (x - b), lost + (r - x) ** 2
    assert update > 0 and abs(kept - 100 * along / update) < 0.06 and abs(error - 100 * (lost / update) ** 0.5) < 0.06, (
        kept, error, along / update, (lost / update) ** 0.5)
    assert ("--dtype f32 keeps all" in said["bf16"]) == (error > 10) and "files are" not in said["bf16"], said
    wide, whole, alone = (checkpoint + end for end in ("-f32", "-of-f32", "-weights-of-f32"))
    for out, save in (whole, "full"), (alone, "weights"):
        megatrain("-q", "run", write_ini(out + ".ini", base(wide, data, out, model__init="weights", train__steps=1, data__eval="",
                                                            checkpoint__save=save)))
    said = [megatrain("export", out + "/checkpoint-1", f"{out}-{d}", "--dtype", d).stderr
            for out, d in ((whole, "bf16"), (whole, "f32"), (alone, "f32"))]
    assert "the model's files are float32, and the export is in bf16" in said[0] and "files are" not in said[1], said
    assert "has weights alone, in bf16, so that is what the export has in f32" in said[2] and "weights alone" not in said[1], said


def scales_that_vllm_would_not_have_are_warned_of(tmp):
    """It reads r and lora_alpha alone: a module of another rank keeps the scale if its alpha is in the same ratio."""
    model, data = random_model(tmp, "scales", "qwen3")
    for i, (over, words) in enumerate((({}, ""), ({"rank_pattern": "v_proj:2"}, "1 of their patterns (v_proj)"), ({"alpha_pattern": "q_proj:3"}, "(q_proj)"),
                                       ({"rank_pattern": "v_proj:2", "alpha_pattern": "v_proj:4"}, ""),
                                       ({"rank_pattern": "v_proj:2", "alpha_pattern": "v_proj:4", "rslora": "on"}, "(v_proj)"))):
        keys = {"adapter__" + k: v for k, v in {"alpha": 8, "targets": "q_proj, v_proj", **over}.items()}
        checkpoint, _ = train(tmp, "scales-lora", model, data, **keys)
        said = megatrain("export", checkpoint, f"{checkpoint}-{i}").stderr
        assert ("vLLM" in said) == bool(words) and words in said, (over, said)
    for i, (over, words) in enumerate((({"kind": "dora"}, "vLLM refuses these adapters: DoRA;"), ({"train_also": "k_proj"}, "(modules_to_save)"),
                                       ({"rank": 17}, "--max-lora-rank 32"), ({"rank": 128}, "--max-lora-rank 128"), ({"rank": 16}, ""))):
        checkpoint, _ = train(tmp, "refused-lora", model, data, **{"adapter__" + k: v for k, v in {"targets": "q_proj, v_proj", **over}.items()})
        said = megatrain("export", checkpoint, f"{checkpoint}-refused-{i}").stderr
        assert ("vLLM" in said) == bool(words) and words in said, (over, said)


def scales_are_folded_into_b(tmp):
    """For programs that read no patterns: one rank, a scale of 1, and the same model."""
    model, data = random_model(tmp, "folded", "qwen2")
    keys = {"adapter__alpha": 6, "adapter__targets": "q_proj, v_proj, down_proj", "adapter__rank_pattern": "v_proj:2, 1.mlp.down_proj:5",
            "adapter__alpha_pattern": "q_proj:3", "adapter__train_also": "k_proj"}
    for name, more in (("lora", {}), ("rslora", {"adapter__rslora": "on"}), ("dora", {"adapter__kind": "dora"})):
        checkpoint, tensors = train(tmp, "folded-" + name, model, data, **keys, **more)
        folded = f"{checkpoint}-{name}"
        said = megatrain("export", "--fold-scales", checkpoint, folded).stderr
        assert "pattern" not in said and ("refuses these adapters: " + ("DoRA, and " if name == "dora" else "") + "modules") in said, said
        got, now = settings(checkpoint), settings(folded)
        assert now.pop("r") == now.pop("lora_alpha") == 5 and not now["use_rslora"] and not now["rank_pattern"] and not now["alpha_pattern"], now
        assert {k: v for k, v in now.items() if "rslora" not in k and "pattern" not in k} == {
            k: v for k, v in got.items() if "rslora" not in k and "pattern" not in k and k not in ("r", "lora_alpha")}
        after = read_safetensors(os.path.join(folded, "adapter_model.safetensors"))
        assert after.keys() == tensors.keys()
        for n, (dtype, shape, raw) in tensors.items():
            part = n.split(".")[-2]
            want = [5, shape[1]] if part == "lora_A" else [shape[0], 5] if part == "lora_B" else shape
            assert after[n][:2] == (dtype, want) and ("lora" in part or after[n][2] == raw), (n, after[n][:2])
        loss, without = (eval_loss(tmp, model, data, *a) for a in (("--adapter", checkpoint), ()))
        assert abs(eval_loss(tmp, model, data, "--adapter", folded) / loss - 1) < 1e-6 < 3e-6 < abs(without / loss - 1), (name, loss, without)
        megatrain("verify", folded)
    said = megatrain("export", "--fold-scales", model, os.path.join(tmp, "no"), expect=2).stderr
    assert "adapters" in said, said
    moe, _ = random_model(tmp, "folded-moe", "qwen3_moe")
    checkpoint, _ = train(tmp, "folded-experts", moe, data, adapter__targets="q_proj, experts.gate_up_proj")
    assert "target_parameters" in megatrain("export", "--fold-scales", checkpoint, os.path.join(tmp, "no"), expect=2).stderr


def packed_bases_are_decoded_for_what_needs_them(tmp):
    """DoRA's first lengths, and a merged model: as on the same model with its weights decoded."""
    model, data = random_model(tmp, "dense", "qwen2", hidden_size=128, intermediate_size=192)
    for form in ("nf4", "fp8"):
        packed, decoded = os.path.join(tmp, form), os.path.join(tmp, form + "-decoded")
        megatrain("-q", "export", model, packed, "--quantize", form)
        write_decoded(decoded, packed, "F32")
        for kind in ("dora", "lora"):
            keys = dict(adapter__kind=kind, adapter__targets="all-linear")
            want, tensors = train(tmp, f"{form}-{kind}-want", decoded, data, **keys)
            for name, base_of, more in (("files", packed, {}), ("made", model, {"model__base_dtype": form})):
                if name == "made" and kind == "lora":
                    continue
                got, of_packed = train(tmp, f"{form}-{kind}-{name}", base_of, data, **keys, **more)
                assert of_packed == tensors and losses(os.path.dirname(got)) == losses(os.path.dirname(want)), (form, kind, name)
            merged = [f"{got}-merged", f"{want}-merged"]
            megatrain("-q", "export", "--merge", "--dtype", "f32", "--model", packed, got, merged[0])
            megatrain("-q", "export", "--merge", "--dtype", "f32", "--model", decoded, want, merged[1])
            said = megatrain("export", "--merge", "--model", packed, got, f"{got}-bf16").stderr
            assert "trained on a base packed" not in said, said
            other = megatrain("export", "--merge", "--model", model, got, f"{got}-other").stderr
            assert f"trained on a base packed as {form} and is merged into {model}" in other and "--quantize " + form in other, other
            assert re.search(r"adds?, \S+% is left in bf16, with an error of \S+% of its norm", said), said
            a, b = (read_safetensors(os.path.join(m, "model.safetensors")) for m in merged)
            assert a.keys() == b.keys() and all(a[n] == b[n] for n in a), [n for n in a if a[n] != b.get(n)]
    moe, _ = random_model(tmp, "moe4", "qwen3_moe")
    said = megatrain("export", moe, os.path.join(tmp, "moe-nf4"), "--quantize", "nf4").stderr
    assert "experts in NF4 are read by megatrain alone" in said, said


for test in chosen((modules_trained_whole_have_the_names_of_transformers, files_with_another_prefix_have_the_names_of_transformers,
             what_peft_would_not_find_is_refused, a_tied_table_is_one,
             a_copy_of_the_head_that_differs_is_warned_of, what_rounding_leaves_of_an_adapter_is_said,
             scales_that_vllm_would_not_have_are_warned_of, scales_are_folded_into_b,
             packed_bases_are_decoded_for_what_needs_them),
                   first=(modules_trained_whole_have_the_names_of_transformers, what_peft_would_not_find_is_refused, a_tied_table_is_one)):
    with tempfile.TemporaryDirectory() as folder:
        test(folder)
        print("ok", test.__name__, flush=True)
