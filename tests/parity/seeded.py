# SPDX-License-Identifier: Apache-2.0
"""Adapters to begin from, by their names and shapes alone: what scripts/reference/family_fixtures.py trains with PEFT is what
test_families.py trains. Standard library only."""
import array
import json
import os
import random

from tiny import write_safetensors

STEPS, ROWS, RATE = 6, 4, 2e-3


def values(family, tensor, shape):
    """Of the size that training gives them; A by its number of columns, as PEFT begins it."""
    r = random.Random(f"{family} {tensor}")
    most = 1 / shape[-1] ** 0.5 if "lora_A" in tensor else 0.09
    n = 1
    for d in shape:
        n *= d
    return array.array("f", (r.uniform(-most, most) for _ in range(n)))


def write_start(folder, family, config, shapes):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(config, f)
    write_safetensors(os.path.join(folder, "adapter_model.safetensors"),
                      {t: ("F32", shape, values(family, t, shape).tobytes()) for t, shape in shapes.items()})


def digest(numbers):
    """Sum and Euclidean norm of a tensor."""
    return [sum(numbers), sum(x * x for x in numbers) ** 0.5]
