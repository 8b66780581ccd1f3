# SPDX-License-Identifier: Apache-2.0
"""The head in pieces of logits: the same bits as in whole chunks, whatever the vocabulary; chunks themselves are numerics."""
import os
import sys
import tempfile

from tiny import base, config, losses, megatrain, planes, write_data, write_ini, write_model

STEPS = 3


def run(tmp, name, dtype, **over):
    out = os.path.join(tmp, name)
    ini = write_ini(out + ".ini", base(os.path.join(tmp, "model"), os.path.join(tmp, "data.jsonl"), out, model__dtype=dtype,
                                       train__steps=STEPS, train__micro_batch=3, eval__every=1, **over))
    megatrain("-q", "run", ini)
    return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}"))


def pieces_give_the_bits_of_chunks(tmp, dtype):
    whole = run(tmp, dtype + "-whole", dtype, memory__logits_chunk=128)
    assert run(tmp, dtype + "-pieces", dtype, memory__logits_chunk=128, memory__logits_piece=64) == whole
    assert run(tmp, dtype + "-long", dtype, memory__logits_chunk=128, memory__logits_piece=4096) == whole
    assert run(tmp, dtype + "-chunks", dtype, memory__logits_chunk=64)[1] != whole[1]


def a_piece_is_part_of_the_numerics(tmp):
    out = os.path.join(tmp, "bf16-pieces")
    assert "logits_piece = 64" in open(os.path.join(out, "config.effective.ini")).read()
    ini = out + ".ini"
    said = megatrain("run", ini, "--resume", "--set", "memory.logits_piece=128", expect=2).stderr
    assert "memory.logits_piece: 64 -> 128" in said, said
    said = megatrain("run", ini, "--set", "memory.logits_piece=100", expect=2).stderr
    assert "multiple of 64" in said, said


with tempfile.TemporaryDirectory() as tmp:
    write_data(os.path.join(tmp, "data.jsonl"), vocab=269)
    write_model(os.path.join(tmp, "model"), config("qwen2", vocab_size=269, num_hidden_layers=2))
    for dtype in ("bf16", "f32"):
        pieces_give_the_bits_of_chunks(tmp, dtype)
    a_piece_is_part_of_the_numerics(tmp)
