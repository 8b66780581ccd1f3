# SPDX-License-Identifier: Apache-2.0
"""Makes tests/parity/families: of each family in tests/parity, adapters on all its linear layers and experts that PEFT can
wrap (what it cannot: NOT_OF), trained with PEFT, transformers and torch.optim.AdamW, once on the model as it is and once
on a packed one. A file keeps shapes, losses, norms, sum and norm of each tensor, and sums of two (sums.py): the models are those of
tests/parity, adapters to begin from follow from their names (write_start() of tests/parity/test_families.py). Then runs megatrain on them, has
PEFT load what it wrote, and compares logits. Run by hand when a family changes; the tests need no torch.
    MEGATRAIN=build/cli/megatrain .venv-parity/bin/python scripts/reference/family_fixtures.py [NAME...]
"""
import glob
import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity"))
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

import parity
import sums  # of tests/parity
from parity import double_throughout, load, train_torch
from seeded import fixture
from test_families import HERE as PARITY, RATE, ROWS, STEPS, digest, packed_base, run, start_of
from test_packed import write_decoded

ROOT = os.path.join(PARITY, "families")
#: not adapted: PEFT would wrap these, but not in the way that they are trained (routers are parameters: adapter_fixtures.py)
NOT = ("lm_head", "gate", "router", "wg", "shared_expert_gate", "proj_router")
#: refused by PEFT beside Mamba 2; in Trinity, of which PEFT takes a gate of attention for that of experts
NOT_OF = {"nemotron_h": ("out_proj",), "nemotron_super": ("out_proj",), "afmoe": ("gate_proj",)}
MLP = ("gate_proj", "up_proj", "down_proj")
KEPT = ("peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "task_type")
EXPERTS = r"\.(experts\.(?:gate_up_proj|up_proj|down_proj))$"


def targets(name, model):
    """Names of linear layers of the decoder, and of parameters: all experts of a layer, and MLPs beside experts, whose
    modules' names PEFT takes for the experts'."""
    nested = hasattr(model.config, "text_config")
    inside = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and (not nested or "language_model" in n)]
    inside = [n for n in inside if "indexer" not in n and n.split(".")[-1] not in NOT]
    experts = {m[1] for n, p in model.named_parameters() if (m := re.search(EXPERTS, n))}
    beside = {".".join(n.split(".")[-2:]) + ".weight" for n in inside if experts and n.endswith(MLP) and ".self_attn." not in n}
    left = {n.split(".")[-1] for n in inside} - set(MLP if experts else ()) - set(NOT_OF.get(name, ()))
    return rf".*language_model.*\.({'|'.join(sorted(left))})" if nested else sorted(left), sorted(experts | beside)


def adapted(name, folder, config=None):
    model = load(folder)
    if config is None:
        modules, experts = targets(name, model)
        config = dict(r=4, lora_alpha=8, target_modules=modules, **({"target_parameters": experts} if experts else {}))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    return model


def begin(model, name):
    """Sets A and B as the test does; returns the shapes by PEFT's names."""
    state = get_peft_model_state_dict(model)
    shapes = {k: list(v.shape) for k, v in sorted(state.items())}
    start = start_of(name, shapes)
    with torch.no_grad():
        for k, v in state.items():
            v.copy_(torch.frombuffer(bytearray(start[k][2]), dtype=torch.float32).reshape(v.shape))
    assert all((p.abs().sum() > 0) for n, p in model.named_parameters() if "lora_" in n), "a state that is not the parameters'"
    return shapes


def train(model, samples):
    """What training gives in double."""
    with double_throughout(model.config):
        losses, norms = train_torch(model.double(), samples, "f64", lr=RATE, steps=STEPS, rows=ROWS)
    return losses, norms, {k: v.detach().float() for k, v in get_peft_model_state_dict(model).items()}


def numbers(t):
    return t.double().reshape(-1).tolist()


def case(model, name, samples):
    losses, norms, end = train(model, samples)
    some = sorted(end)[len(end) // 3::max(1, len(end) // 2)][:2]
    return {"losses": losses, "norms": norms,
            "digests": {k: digest(numbers(v)) for k, v in sorted(end.items())}, "sums": {k: [float(f"{s:.10g}") for s in sums.sums_of(k, numbers(end[k]))] for k in some}}


def compact(text):
    """JSON with short lists on one line."""
    return re.sub(r"\[\s+([^\[\]{}]{1,100}?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)


def make(name, samples, tmp):
    model = adapted(name, fixture(name))
    shapes = begin(model, name)
    config = {k: v for k, v in model.peft_config["default"].to_dict().items() if k in KEPT and v is not None}
    config = {k: sorted(v) if isinstance(v, set) else v.value if hasattr(v, "value") else v for k, v in config.items()}
    out = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, peft {peft.__version__}",
           "adapter": config, "shapes": shapes, "lora": case(model, name, samples)}
    if "mxfp4" not in name:  # whose base is packed
        fmt = "nf4" if len(name) % 2 else "fp8"
        packed = packed_base(tmp, name, fmt)
        plain = write_decoded(os.path.join(tmp, name + "-decoded"), packed, "F32")
        more = {k: config[k] for k in ("r", "lora_alpha", "target_modules", "target_parameters") if k in config}
        on_packed = adapted(name, plain, more)
        assert begin(on_packed, name) == shapes
        out["packed"] = {"format": fmt, **case(on_packed, name, samples)}
    with open(os.path.join(ROOT, name + ".json"), "w") as f:
        f.write(compact(json.dumps(out, indent=1)) + "\n")
    return out


def check(name, samples, tmp):
    """megatrain's adapters and merged model, as PEFT and transformers read them."""
    with open(os.path.join(ROOT, name + ".json")) as f:
        expected = json.load(f)
    worst = [run(tmp, name, expected, kind) for kind in ("lora", "packed") if kind in expected]
    checkpoint = worst[0][1]
    merged = os.path.join(tmp, name + "-merged")
    parity.megatrain("-q", "export", "--merge", "--dtype", "f32", checkpoint, merged)
    ids = torch.tensor([samples[0]["input_ids"]])
    with torch.no_grad():
        ours = load(merged)(input_ids=ids).logits
        theirs = PeftModel.from_pretrained(load(fixture(name)), checkpoint)(input_ids=ids).logits
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max(), "PEFT reads other adapters than are merged"
    print(name, len(expected["shapes"]), "tensors", *(f"{k} {e}" for e, _ in worst for k, e in e.items()), flush=True)


def main():
    torch.set_num_threads(1)  # products are too small for more threads
    transformers.utils.logging.disable_progress_bar()
    os.makedirs(ROOT, exist_ok=True)
    with open(os.path.join(PARITY, "data.jsonl")) as f:
        samples = [json.loads(l) for l in f]
    names = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(PARITY, "*", "trained.sums")))
    failed = []
    for name in sys.argv[1:] or names:
        with tempfile.TemporaryDirectory() as tmp:
            try:
                make(name, samples, tmp)
                check(name, samples, tmp)
            except Exception as e:  # the other families
                print("FAIL", name, type(e).__name__, str(e)[:600], e.__traceback__.tb_next.tb_lineno, flush=True)
                failed.append(name)
    sys.exit(f"failed: {failed}" if failed else 0)


main()
