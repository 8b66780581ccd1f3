# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, with experts beside the MLP and without: no placement changes a bit, of training all and of adapters; a frozen
part stays as it was, packed bases train, exports have the files' tensors, and what is not supported is refused by name. The
placements also of Nemotron 3 Super, beside whose experts there are products that lead to fewer dimensions and back."""
import json
import os
import shutil
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PARITY = os.path.join(HERE, "..", "parity")
sys.path.insert(0, HERE)
from tiny import base, fixture, losses, megatrain, planes, read_safetensors, trained_planes, write_ini, write_model

STEPS = 3
HALF = {"memory__unit": "half", "memory__slots": 2, "memory__activations": "recompute"}
KEPT = {"memory__activations": "keep", "device__cpu_threads": 1}
DISK = {"memory__states": "disk", "memory__nvme_paths": "{tmp}/drive", "memory__activations": "disk"}
#: environment, keys; groups of experts are of the mixture alone
PLACEMENTS = {"half": ({"MEGATRAIN_POISON": "1"}, HALF, {"memory__expert_group": 3}),
              "kept": ({}, KEPT, {"memory__expert_group": 1}),
              "disk": ({"MEGATRAIN_DISK_PIECE": "2048", "MEGATRAIN_POISON": "1"}, DISK, {"memory__expert_group": 2})}
LORA = {"adapter__kind": "lora", "adapter__rank": 4, "adapter__targets": "all-linear"}


def run(tmp, name, model, env=None, get=planes, **over):
    out = os.path.join(tmp, name)
    over = {k: str(v).replace("{tmp}", tmp) for k, v in over.items()}
    ini = write_ini(out + ".ini", base(model, os.path.join(tmp, "data.jsonl"), out, **{
        "model__init": "weights", "data__eval": "", "train__steps": STEPS, "train__batch_size": 4, **over}))
    megatrain("-q", "run", ini, env=env)
    return losses(out), get(os.path.join(out, f"checkpoint-{STEPS}"))


def check_placements(tmp, family, what, get, **keys):
    model, moe = fixture(family), family != "gemma4_text"
    first = run(tmp, f"{family}-{what}", model, get=get, **keys)
    for name, (env, over, of_experts) in PLACEMENTS.items():
        got = run(tmp, f"{family}-{what}-{name}", model, env=env, get=get, **keys, **over, **(of_experts if moe else {}))
        assert got == first, f"{family}, {what}: {name} gives other bits"
    return first


def check_frozen(tmp):
    """Only what is not frozen changes, and trains as it did beside what is."""
    model = fixture("gemma4_moe")
    out = os.path.join(tmp, "frozen")
    run(tmp, "frozen", model, model__freeze="*experts*, *router*, *self_attn*", train__learning_rate="0.05")
    megatrain("-q", "export", os.path.join(out, f"checkpoint-{STEPS}"), out + "-exported")
    before, after = (read_safetensors(os.path.join(d, "model.safetensors")) for d in (model, out + "-exported"))
    assert set(before) == set(after)
    same = {n for n in before if before[n] == after[n]}
    kept = {n for n in before if any(w in n for w in ("experts", "router", "self_attn", "layer_scalar"))}
    assert same == kept, same ^ kept


def check_exports(tmp):
    out = os.path.join(tmp, "gemma4_moe-all", f"checkpoint-{STEPS}")
    megatrain("-q", "export", out, os.path.join(tmp, "exported"))
    given = read_safetensors(os.path.join(fixture("gemma4_moe"), "model.safetensors"))
    got = read_safetensors(os.path.join(tmp, "exported", "model.safetensors"))
    assert {n: t[:2] for n, t in got.items()} == {n: t[:2] for n, t in given.items()}


def check_packed(tmp):
    """Adapters on a base that is packed when it is loaded: the same bits in halves; what was packed is as near as NF4 is."""
    for family in ("gemma4_text", "gemma4_moe"):
        keys = dict(LORA, model__dtype="bf16", get=trained_planes)
        model = fixture(family)
        plain = run(tmp, "plain-" + family, model, **keys)
        first = run(tmp, "nf4-" + family, model, model__base_dtype="nf4", **keys)
        env, over, _ = PLACEMENTS["half"]
        assert run(tmp, "nf4-half-" + family, model, env=env, model__base_dtype="nf4", **keys, **over) == first
        assert first[0] != plain[0] and all(abs(a / b - 1) < 0.05 for (_, a, _), (_, b, _) in zip(first[0], plain[0])), first[0]


def check_refusals(tmp):
    with open(os.path.join(PARITY, "gemma4_text", "config.json")) as f:
        cfg = json.load(f)
    for keys, words in (({"hidden_size_per_layer_input": 8}, "E2B"), ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
                        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
                        ({"rope_parameters": None}, "rope_scaling"), ({"num_global_key_value_heads": 4}, "num_global_key_value_heads")):
        model = write_model(os.path.join(tmp, "refused"), {**cfg, **keys})
        ini = write_ini(os.path.join(tmp, "refused.ini"), base(model, os.path.join(tmp, "data.jsonl"), os.path.join(tmp, "no")))
        p = megatrain("-q", "run", "--dry-run", ini, expect=None)
        assert p.returncode and words in p.stderr, (keys, p.stderr)


with tempfile.TemporaryDirectory() as tmp:
    shutil.copy(os.path.join(PARITY, "data.jsonl"), tmp)
    os.mkdir(os.path.join(tmp, "drive"))
    for family in ("gemma4_text", "gemma4_moe", "nemotron_super"):
        check_placements(tmp, family, "all", planes)
        check_placements(tmp, family, "adapters", trained_planes, **LORA)
    check_frozen(tmp)
    check_exports(tmp)
    check_packed(tmp)
    check_refusals(tmp)
