# SPDX-License-Identifier: Apache-2.0
"""Twenty steps with Lion, SGD, Adafactor, Muon and APOLLO against lion-pytorch, torch, transformers and apollo-torch, which
ran in double (scripts/reference/parity_optimizers.py), on a dense model and on a mixture.

Lion takes the sign of a sum: where that is nearly 0, two programs may differ by a whole step. So its weights are those of
the reference but for a few; SGD's are as close as AdamW's."""
import json
import os
import sys
import tempfile

from test_parity import HERE, SLOW, at_most, floats, relative, train, weight_errors
from tiny import megatrain, read_safetensors


LIMIT = {"adafactor": 1e-6, "muon": 2e-5, "apollo": 1e-5, "apollo_mini": 1e-5, "galore": 1e-5}  # of relative L2 of a tensor


def share_that_differs(checkpoint, trained, limit):
    got = read_safetensors(os.path.join(checkpoint + "-f32", "model.safetensors"))
    pairs = [(x, y) for name, (_, _, raw) in read_safetensors(trained).items() for x, y in zip(floats(got[name][2]), floats(raw))]
    return sum(abs(x - y) > limit for x, y in pairs) / len(pairs)


def check(tmp, name, case):
    path = os.path.join(HERE, "optimizers", f"{name}-{case}")
    with open(path + ".json") as f:
        expected = json.load(f)
    print(f"{name}, {case}: {expected['made_with']}")
    keys = {f"{'train' if k == 'grad_clip' else 'optimizer'}__{k}": v for k, v in expected["optimizer"].items()}
    sign = case == "lion"
    steps, checkpoint = train(tmp, name, "f32", expected, **keys)
    at_most("losses", max(relative(m["loss"], l) for m, l in zip(steps, expected["losses"])), 2e-6)
    errors = sorted(relative(m["grad_norm"], n) for m, n in zip(steps, expected["norms"]))
    at_most("norm of the median step", errors[len(errors) // 2], 1e-5)
    if SLOW:
        return
    errors = {} if sign else weight_errors(checkpoint, path + ".sums", name)
    if sign:
        megatrain("-q", "export", checkpoint, checkpoint + "-f32", "--dtype=f32")
        at_most("share of weights that differ", share_that_differs(checkpoint, path + ".safetensors", 1e-6), 1e-3)
    else:
        at_most("weights", max(e for n, e in errors.items() if not n.endswith("k_proj.bias")), LIMIT.get(case, 2e-5))
    # the comparison sees a change: a hundredth more of weight decay, or less of the first decay
    change = {"optimizer__beta1": 0.89} if sign else {"optimizer__weight_decay": 0.101}
    other = os.path.join(tmp, "other")
    os.mkdir(other)
    _, changed = train(other, name, "f32", expected, **{**keys, **change})
    if sign:
        megatrain("-q", "export", changed, changed + "-f32", "--dtype=f32")
        assert share_that_differs(changed, path + ".safetensors", 1e-6) > 0.01
    else:
        assert max(weight_errors(changed, path + ".sums", name).values()) > 3 * max(
            e for n, e in errors.items() if not n.endswith("k_proj.bias"))


for name in "qwen2", "qwen2_moe":
    for case in sys.argv[1:] or ("lion", "momentum", "sgd", "adafactor", "muon", "apollo", "apollo_mini", "galore"):
        with tempfile.TemporaryDirectory() as tmp:
            check(tmp, name, case)
