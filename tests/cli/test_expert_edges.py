# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts at their edges. Where all experts of a layer are the same and their weights add up to one, a
mixture is the dense model, however its router chooses: so routers that leave experts without rows, or with one, or with
all, are compared with a run of the dense model. And files whose experts are not those of config.json."""
import array
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile

from tiny import BINARY, base, config, megatrain, metrics, read_safetensors, write_ini, write_model, write_safetensors

HIDDEN, WIDTH, VOCAB, LAYERS, RARE = 32, 24, 272, 2, 7
DENSE = config("qwen3", hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCAB,
               bos_token_id=1, eos_token_id=2, head_dim=8, rms_norm_eps=1e-6)
MLP = ("gate_proj", "up_proj", "down_proj")


def mixture(experts, chosen):
    return config("qwen3_moe", **{**DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                                  "num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": WIDTH,
                                  "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1})


def tensor(*shape, seed=0, std=0.05, values=None):
    r = random.Random(seed)
    values = values or [r.gauss(0, std) for _ in range(math.prod(shape))]
    return "F32", list(shape), array.array("f", values).tobytes()


def dense_weights():
    embed = floats(tensor(VOCAB, HIDDEN, seed=1, std=1))
    for token in range(VOCAB):
        embed[token * HIDDEN] = 6 if token == RARE else -2
    w = {"model.embed_tokens.weight": tensor(VOCAB, HIDDEN, values=embed), "lm_head.weight": tensor(VOCAB, HIDDEN, seed=2),
         "model.norm.weight": tensor(HIDDEN, values=[1.0] * HIDDEN)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for name, rows, cols in (("q", 32, HIDDEN), ("k", 16, HIDDEN), ("v", 16, HIDDEN), ("o", HIDDEN, 32)):
            # attention gives nothing in the first step: the router sees tokens alone, which can be told where to go
            w[f"{p}self_attn.{name}_proj.weight"] = tensor(rows, cols, seed=f"{i}{name}", std=0.0 if name == "o" else 0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"] = tensor(HIDDEN, values=[1.0] * HIDDEN)
        for name in ("q_norm", "k_norm"):
            w[f"{p}self_attn.{name}.weight"] = tensor(8, values=[1.0] * 8)
        for name in MLP:
            w[f"{p}mlp.{name}.weight"] = tensor(*((HIDDEN, WIDTH) if name == "down_proj" else (WIDTH, HIDDEN)),
                                                seed=f"{i}{name}", std=0.1)
    return w


def floats(t):
    return array.array("f", t[2])


def mixture_weights(dense, experts, router):
    """All experts are the dense layer."""
    w = {k: v for k, v in dense.items() if ".mlp." not in k}
    for i in range(LAYERS):
        w[f"model.layers.{i}.mlp.gate.weight"] = tensor(experts, HIDDEN, values=router)
        for e in range(experts):
            for name in MLP:
                w[f"model.layers.{i}.mlp.experts.{e}.{name}.weight"] = dense[f"model.layers.{i}.mlp.{name}.weight"]
    return w


def model_of(path, cfg, weights):
    write_model(path, cfg)
    write_safetensors(os.path.join(path, "model.safetensors"), weights)
    return path


def write_tokens(path, samples):
    with open(path, "w") as f:
        for s in samples:
            f.write(json.dumps({"input_ids": s, "labels": s}) + "\n")
    return path


def first_step(tmp, name, model, data, rows, **over):
    """One step without clipping: its records, and the first moments that AdamW has of it, a tenth of the gradient."""
    out = os.path.join(tmp, name)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **{
        "model__init": "weights", "data__eval": "", "data__shuffle": "off", "data__packing": "off", "train__steps": 1,
        "train__batch_size": rows, "train__micro_batch": 1 if rows == 1 else 2, "train__grad_clip": 0, "train__warmup": 0,
        "optimizer__grad_dtype": "f32", **over})))
    moments = {}
    d = os.path.join(out, "checkpoint-1", "megatrain")
    for f in os.listdir(d):
        if f.endswith(".safetensors"):
            moments.update({k[:-len(".exp_avg")]: floats(v) for k, v in read_safetensors(os.path.join(d, f)).items()
                            if k.endswith(".exp_avg")})
    return metrics(out), moments


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b))) / math.sqrt(sum(y * y for y in b))


def zeros(experts):
    return [0.0] * (experts * HIDDEN)


def drawn(experts):
    return list(floats(tensor(experts, HIDDEN, seed=5, std=1)))


def rare_to(expert, experts):
    """The rare token, whose first element alone is above zero, to that expert; all others to expert 0."""
    w = zeros(experts)
    w[expert * HIDDEN] = 1.0
    return w


def tied(a, b, experts):
    """Experts a and b are equal, the others are alike: of each pair the first is chosen."""
    w, row = zeros(experts), drawn(1)
    for e in (a, b):
        w[e * HIDDEN:(e + 1) * HIDDEN] = row
    return w


USUAL = [[9, 3, 11, 40], [5, 6, 9], [60, 61, 62, 63, 2], [13, 13], [20, 30, 50, 8, 8, 1], [2, 3, 4]]
ONE_RARE = USUAL[:5] + [[2, RARE, 4]]
MANY = [[(5 * i + 11 * j) % VOCAB for j in range(64)] for i in range(264)]  # more than a tile of 16384 rows
#: name -> chosen of each token, router, samples; experts of the first layer that have rows; the fullest's share of n
CASES = {
    "no rows and all rows": (1, zeros(5), USUAL, [0], lambda n: 1),
    "one row": (1, rare_to(3, 4), ONE_RARE, [0, 3], lambda n: (n - 1) / n),
    "all are chosen": (3, drawn(3), USUAL, [0, 1, 2], lambda n: 1 / 3),
    "of seven": (3, drawn(7), USUAL, list(range(7)), None),
    "one expert": (1, drawn(1), USUAL, [0], lambda n: 1),
    "two are tied": (1, tied(1, 3, 5), USUAL, [0, 1], None),
    "all are tied": (2, zeros(5), USUAL, [0, 1], lambda n: 1 / 2),
    "two tiles": (1, rare_to(1, 2), MANY, [0, 1], None),
    "two tokens": (1, rare_to(2, 6), [[9, RARE]], [0, 2], lambda n: 1 / 2),
}


def with_gradient(moments, experts):
    return [e for e in range(experts) if any(moments[f"model.layers.0.mlp.experts.{e}.down_proj.weight"])]


def routers_at_their_edges(tmp):
    dense = dense_weights()
    plain = model_of(os.path.join(tmp, "dense"), DENSE, dense)
    for name, (chosen, router, samples, busy, share) in CASES.items():
        experts, folder = len(router) // HIDDEN, os.path.join(tmp, name.replace(" ", "-"))
        data = write_tokens(folder + ".jsonl", samples)
        want, dense_moments = first_step(tmp, f"{name} dense", plain, data, len(samples))
        model = model_of(folder, mixture(experts, chosen), mixture_weights(dense, experts, router))
        got, moments = first_step(tmp, name, model, data, len(samples))
        layer = [m for m in got if m.get("layer") == 0]
        assert len(layer) == 1 and layer[0]["experts_idle"] == experts - len(busy), (name, layer)
        assert not share or abs(layer[0]["expert_max_share"] - share(sum(map(len, samples)))) < 1e-6, (name, layer)
        learned = with_gradient(moments, experts)  # of a sample's last token there is no gradient: attention gives nothing
        assert learned and set(learned) <= set(busy), (name, learned)
        loss = [[m["loss"] for m in x if "loss" in m] for x in (want, got)]
        assert len(loss[1]) == 1 and abs(loss[1][0] / loss[0][0] - 1) < 1e-6, (name, loss)
        for key, g in dense_moments.items():
            if ".mlp." in key:  # an expert's gradient is of its own rows: all of them add up to the dense one
                parts = [moments[key.replace(".mlp.", f".mlp.experts.{e}.")] for e in range(experts)]
                h = [sum(x) for x in zip(*parts)]
            else:
                h = moments[key]
            assert distance(h, g) < 1e-5 if any(g) else not any(h), (name, key, distance(h, g))
        print(f"  {name}: loss {loss[1][0]:.6f}")


def experts_without_rows_decay(tmp):
    """Their Adam has no gradient, and their weights still decay, in each step by the learning rate times the decay."""
    dense = dense_weights()
    model = model_of(os.path.join(tmp, "idle"), mixture(4, 1), mixture_weights(dense, 4, zeros(4)))
    data = write_tokens(os.path.join(tmp, "idle.jsonl"), USUAL)
    out = os.path.join(tmp, "decay")
    megatrain("-q", "run", write_ini(out + ".ini", base(
        model, data, out, model__init="weights", data__eval="", train__steps=3, train__warmup=0, train__schedule="constant",
        train__learning_rate="1e-2", optimizer__weight_decay=0.5)))
    megatrain("-q", "export", os.path.join(out, "checkpoint-3"), out + "-f32", "--dtype=f32")
    got = read_safetensors(os.path.join(out + "-f32", "model.safetensors"))
    for name in MLP:
        for e in range(4):
            key = f"model.layers.0.mlp.experts.{e}.{name}.weight"
            decayed = [x * (1 - 1e-2 * 0.5) ** 3 for x in floats(dense[f"model.layers.0.mlp.{name}.weight"])]
            assert (distance(floats(got[key]), decayed) < 1e-6) == (e > 0), key


def loaded_bytes(model, tokens, env=None):
    """Bytes that a forward loads, of the first token after a prompt of so many, and what it says."""
    said = subprocess.run([BINARY, "sample", "--model", model, "--prompt", "abcdefgh"[:tokens], "--max-tokens", "1"],
                          capture_output=True, check=True, env={**os.environ, **(env or {})})
    n, unit = re.search(rb"1 tokens, \S+ seconds and (\S+) (\S+) loaded a token", said.stderr).groups()
    return float(n) * {b"KiB": 1 << 10, b"MiB": 1 << 20}[unit], said.stdout


def experts_without_rows_are_not_loaded(tmp):
    """Of 48 experts a layer, no more are loaded than have rows. The prompt's tokens are its bytes after a first one."""
    dense, unit = dense_weights(), 8192 * 2  # bytes of an expert's unit in bf16
    one, four, all_ = (model_of(os.path.join(tmp, f"of{k}"), mixture(48, k), mixture_weights(dense, 48, drawn(48)))
                       for k in (1, 4, 48))
    rest = loaded_bytes(all_, 1)[0] - 48 * LAYERS * unit
    few, more, longer = (round((loaded_bytes(m, n)[0] - rest) / unit) for m, n in ((one, 1), (four, 1), (one, 7)))
    assert LAYERS <= few <= 2 * LAYERS and 4 * LAYERS <= more <= 8 * LAYERS, (few, more)
    assert few < longer <= 8 * LAYERS, (few, longer)
    assert loaded_bytes(four, 4, {"MEGATRAIN_POISON": "1"}) == loaded_bytes(four, 4)


def one_token_is_sampled(tmp):
    """A prompt of one token: every product of the first forward has one row, and seven of eight experts have none."""
    dense = dense_weights()
    model = model_of(os.path.join(tmp, "sampled"), mixture(8, 1), mixture_weights(dense, 8, drawn(8)))
    plain = model_of(os.path.join(tmp, "plain"), DENSE, dense)
    said = subprocess.run([BINARY, "sample", "--model", model, "--prompt", "a", "--max-tokens", "2"], capture_output=True, check=True)
    assert re.search(rb"[12] tokens, \S+ seconds and .* loaded a token", said.stderr), said.stderr
    bytes_of = [subprocess.run([BINARY, "-q", "sample", "--model", m, "--prompt", "a", "--max-tokens", "4", "--seed", "3"],
                               capture_output=True, check=True).stdout for m in (model, plain)]
    assert bytes_of[0] == bytes_of[1] and len(bytes_of[0]) > 2, bytes_of


def files_of_other_experts(tmp):
    dense = dense_weights()
    good = mixture_weights(dense, 3, drawn(3))
    data = write_tokens(os.path.join(tmp, "data.jsonl"), USUAL)
    down, up = "model.layers.1.mlp.experts.2.down_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"
    per_expert = {k: v for k, v in good.items() if ".experts." not in k}
    fused = {**per_expert, "model.layers.0.mlp.experts.gate_up_proj": tensor(3, 2 * WIDTH, HIDDEN),
             "model.layers.0.mlp.experts.down_proj": tensor(3, HIDDEN, WIDTH)}
    cases = {
        "missing": ({k: v for k, v in good.items() if k != down}, [f'tensor "{down}" is missing']),
        "wide": ({**good, up: tensor(WIDTH + 1, HIDDEN)}, [f'tensor "{up}" has shape [{WIDTH + 1}, {HIDDEN}]',
                                                          f"config.json asks for [{WIDTH}, {HIDDEN}]"]),
        "one too many": ({**good, "model.layers.0.mlp.experts.3.up_proj.weight": good[up]},
                         ["model.layers.0.mlp.experts.3.up_proj.weight", "is not part of"]),
        "fused": (fused, ["gate_proj.weight\" is missing, but there is \"model.layers.0.mlp.experts.down_proj\"", "in the form of the model's release"]),
        "no router": ({k: v for k, v in good.items() if ".gate.weight" not in k}, ["model.layers.0.mlp.gate.weight"]),
    }
    for name, (weights, words) in cases.items():
        model = model_of(os.path.join(tmp, name.replace(" ", "-")), mixture(3, 1), weights)
        out = os.path.join(tmp, "out-" + name.replace(" ", "-"))
        p = megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, model__init="weights", data__eval="")),
                      expect=None)
        assert p.returncode != 0 and all(w in p.stderr for w in words), (name, p.stderr)
        assert not os.path.exists(os.path.join(out, "checkpoint-10"))


with tempfile.TemporaryDirectory() as tmp:
    for case in sys.argv[1:]:
        print(case)
        globals()[case](tmp)
