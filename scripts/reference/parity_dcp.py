# SPDX-License-Identifier: Apache-2.0
"""Takes a run from megatrain to torch and back: two steps here, the third in torch from what scripts/to_dcp.py wrote, the fourth here
from what it took back. The third's and the fourth's losses are those of a run that was not interrupted. Run by scripts/parity dcp."""
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "cli"))
import torch
import torch.distributed.checkpoint as dcp
import transformers
from tiny import base, config, losses, megatrain, write_ini, write_model
from torch.distributed.checkpoint import state_dict as sd

ROWS, LR = 4, 1e-3
DATA = [[(7 * i * i + 13 * k) % 250 + 3 for i in range(n)] for k, n in enumerate((20, 33, 12, 41))]


def to_dcp(*args):
    subprocess.run([sys.executable, os.path.join(HERE, "..", "to_dcp.py"), *args], check=True)


def ini(tmp, name, **over):
    keys = {"train__steps": 4, "train__batch_size": ROWS, "train__warmup": 0, "train__schedule": "constant", "train__grad_clip": 0,
            "train__learning_rate": LR, "data__eval": "", "data__packing": "off", "model__init": "weights", "checkpoint__every": 1}
    return write_ini(os.path.join(tmp, name + ".ini"), base(os.path.join(tmp, "seed"), os.path.join(tmp, "data.jsonl"), os.path.join(tmp, name),
                                                            **{**keys, **over}))


def step_in_torch(tmp, source, out):
    """The loss of the next step, which it makes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(tmp, "seed"), dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    adamw = torch.optim.AdamW([{"params": [p for n, p in model.named_parameters() if ("norm" in n) == norms]} for norms in (False, True)])
    options = sd.StateDictOptions(flatten_optimizer_state_dict=True)

    def state():
        return {"model": sd.get_model_state_dict(model), "optim": sd.get_optimizer_state_dict(model, adamw, options=options)}

    there = state()
    dcp.load(there, checkpoint_id=source, no_dist=True)
    sd.set_model_state_dict(model, there["model"])
    sd.set_optimizer_state_dict(model, adamw, there["optim"], options=options)
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0] and adamw.param_groups[0]["lr"] == LR
    logits = [model(input_ids=torch.tensor([ids])).logits[0, :-1] for ids in DATA]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor([t for ids in DATA for t in ids[1:]]))
    loss.backward()
    adamw.step()
    dcp.save(state(), checkpoint_id=out, no_dist=True)
    return loss.item()


def main(tmp):
    with open(os.path.join(tmp, "data.jsonl"), "w") as f:
        f.writelines(f'{{"input_ids": {ids}}}\n' for ids in DATA)
    write_model(os.path.join(tmp, "plain"), config("qwen3", num_hidden_layers=2))
    megatrain("-q", "run", ini(tmp, "first", model__path=os.path.join(tmp, "plain"), model__init="random", train__steps=1))
    megatrain("-q", "export", os.path.join(tmp, "first", "checkpoint-1"), os.path.join(tmp, "seed"), "--dtype=f32")
    megatrain("-q", "run", ini(tmp, "whole"))
    want = {step: loss for step, loss, _ in losses(os.path.join(tmp, "whole"))}
    there, torchs, taken = (os.path.join(tmp, name) for name in ("there", "torchs", "taken"))
    to_dcp(os.path.join(tmp, "whole", "checkpoint-2"), there)
    third = step_in_torch(tmp, there, torchs)
    os.makedirs(taken)
    to_dcp("--back", torchs, os.path.join(tmp, "whole", "checkpoint-2"), os.path.join(taken, "checkpoint-2"))
    megatrain("verify", os.path.join(taken, "checkpoint-2"))
    megatrain("-q", "run", ini(tmp, "taken"), "--resume")
    fourth = {step: loss for step, loss, _ in losses(taken)}[3]  # its third step is the run's fourth update
    for name, loss, of in ("third", third, want[3]), ("fourth", fourth, want[4]):
        print(f"{name}: {loss:.9g}, uninterrupted {of:.9g}, relative {abs(loss / of - 1):.1e}")
        assert abs(loss / of - 1) < 1e-6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
