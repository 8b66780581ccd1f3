# SPDX-License-Identifier: Apache-2.0
"""Rows in chunks (train.chunk): losses and gradients of whole rows, and the same bits whatever the placement."""
import json
import math
import os
import re
import struct
import tempfile

import test_policy
import test_preference
from tiny import (POISON, SLOW, base, chosen, config, losses, megatrain, metrics, planes, read_safetensors, run_in, write_data,
                  write_ini, write_model)

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))
SEQ = 256
LATENT = {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
          "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
          "topk_method": "group_limited_greedy", "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "routed_scaling_factor": 2.0, "norm_topk_prob": False}
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
         "mamba_d_head": 8, "mamba_d_conv": 4, "mamba_expand": 2, "shared_intermediate_size": 40}
FAMILIES = {"llama": {}, "mistral": {}, "gpt_oss": {}, "qwen3_moe": {}, "gemma3_text": {}, "qwen3_5_text": {},
            "deepseek_v2": LATENT, "granitemoehybrid": MAMBA}


def setting(tmp, family, **over):
    """A model, and rows of several documents, of which some are nearly a row."""
    model = write_model(os.path.join(tmp, family), config(family, num_hidden_layers=2, **FAMILIES[family], **over))
    return model, write_data(os.path.join(tmp, "data.jsonl"), n=40, longest=SEQ)


def keys(chunk, **over):
    return {"data__seq_len": SEQ, "train__batch_size": 4, "train__micro_batch": 1, "train__chunk": chunk, "train__steps": 3,
            "train__warmup": 0, **over}


def first_moments(out):
    folder, of = os.path.join(out, "checkpoint-1", "megatrain"), {}
    for f in sorted(os.listdir(folder)):
        if f.endswith(".safetensors"):
            of.update({k: v[2] for k, v in read_safetensors(os.path.join(folder, f)).items() if k.endswith(".exp_avg")})
    return of


def apart(a, b):
    """L2, relative."""
    a, b = (struct.unpack(f"<{len(x) // 4}f", x) for x in (a, b))
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b))) / max(math.sqrt(sum(y * y for y in b)), 1e-30)


def chunks_have_the_losses_and_gradients_of_whole_rows(tmp):
    """f32; only sums run in another order. Measured: losses 2e-7, gradients 1e-6."""
    for family in list(FAMILIES)[::2 if SLOW else 1]:
        model, data = setting(tmp, family)
        whole = None
        for n in (1, 4, 16, 64):
            out = run_in(tmp, f"{family}-{n}", model, data, keys(SEQ // n, checkpoint__every=1, data__eval=""), env=POISON)
            of, moments = [m for m in metrics(out) if "loss" in m], first_moments(out)
            whole = whole or (of, moments)
            worst = max(abs(a[k] - b[k]) / b[k] for a, b in zip(of, whole[0]) for k in ("loss", "grad_norm"))
            grads = max(apart(moments[k], whole[1][k]) for k in moments)
            assert all(a["loss_tokens"] == b["loss_tokens"] for a, b in zip(of, whole[0]))
            print(f"   {family}, {n} chunks: losses and norms {worst:.1e}, gradients {grads:.1e}")
            assert worst <= 1e-6 and grads <= 1e-5


DISK = {"memory__activations": "disk", "memory__nvme_paths": "{drive}"}
PLACEMENTS = {
    "kept": {"memory__activations": "keep"},
    "offloaded": {"memory__activations": "offload", "memory__slots": 2},
    "recomputed in halves": {"memory__activations": "recompute", "memory__unit": "half", "memory__slots": 2},
    "little": {"memory__device_budget": "{least}"},
    "on a drive": {"memory__device_budget": "{least}", **DISK},
    "two lanes": {"device__gpus": 2},
    "two lanes by groups": {"device__gpus": 2, "device__map": "data"},
    "updated under backward": {"memory__update": "backward"},
    "one thread": {"device__cpu_threads": 1},
}


def least_budget(tmp, model, data, over):
    low, high = 64, 16 << 10
    while high - low > 32:
        middle = (low + high) // 2
        ini = write_ini(os.path.join(tmp, "probe.ini"), base(model, data, os.path.join(tmp, "none"), **{
            **over, "memory__device_budget": f"{middle}KiB"}))
        fits = not megatrain("-q", "run", "--dry-run", ini, expect=None).returncode
        low, high = (low, middle) if fits else (middle, high)
    return f"{high}KiB"


def placements_change_no_bit(tmp):
    every_placement(os.path.join(tmp, "tokens"), "gpt_oss", {})
    every_placement(os.path.join(tmp, "pairs"), "qwen3_5_text", {"preference__loss": "sigmoid"})


def every_placement(tmp, family, over):
    os.mkdir(tmp)
    model, data = setting(tmp, family)
    if over:
        data = test_preference.write_pairs(os.path.join(tmp, "pairs.jsonl"), n=80)
    common = keys(32, train__groups=2, train__clip="unit", train__steps=4, **over)
    result = lambda out: (losses(out), planes(os.path.join(out, "checkpoint-4")))
    plain = result(run_in(tmp, "plain", model, data, common))
    for name, over in PLACEMENTS.items():
        over = {k: v.replace("{drive}", tmp) if isinstance(v, str) else v for k, v in {**common, **over}.items()}
        if "memory__device_budget" in over:
            over["memory__device_budget"] = least_budget(tmp, model, data, over)
        assert result(run_in(tmp, name, model, data, over, env=POISON)) == plain, name
    out = run_in(tmp, "resumed", model, data, {**common, "checkpoint__every": 2}, "--max-steps", 2)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **{**common, **PLACEMENTS["offloaded"]})), "--resume")
    assert result(out) == plain, "resumed"


def samples_are_measured_whole(tmp):
    model, data = setting(tmp, "qwen3_moe")
    seed = run_in(tmp, "seed", model, data, keys(0, train__steps=1, checkpoint__save="weights"))
    model = os.path.join(seed, "checkpoint-1")
    def of(chunk):
        ini = write_ini(os.path.join(tmp, f"eval-{chunk}.ini"), base(model, data, tmp, **keys(
            chunk, data__eval=data, model__init="weights")))
        scores = os.path.join(tmp, f"{chunk}.scores")
        megatrain("-q", "score", ini, "--data", data, "--out", scores, "--top", 2)
        top[chunk] = os.path.getsize(scores + ".top")
        return json_lines(megatrain("-q", "eval", ini, "--per-sample", "--json").stdout), json_lines(open(scores).read())
    top = {}
    whole, cut = of(0), of(16)
    assert top[0] == top[16] > 1000
    for a, b in zip(whole, cut):
        a, b = (sorted(x, key=lambda l: l.get("sample", -1)) for x in (a, b))
        assert len(a) == len(b) > 20 and [l.get("sample") for l in a] == [l.get("sample") for l in b]
        for x, y in zip(a, b):
            assert x.get("tokens") == y.get("tokens")
            for k in ("loss_sum", "logprob", "loss"):
                assert k not in x or abs(x[k] - y[k]) <= 2e-6 * abs(x[k]) + 1e-6, (k, x, y)


def json_lines(text):
    return [json.loads(l) for l in text.splitlines() if l.startswith("{")]


POLICY = {"policy__old": "file", "policy__kl_weight": 0.1, "policy__mismatch": "token", "policy__max_tokens": 16}
ONE_POLICY = {"policy__old": "batch", "policy__kl_weight": 0, "policy__mismatch": "none"}  # its weights are known before the step


def other_objectives_are_those_of_whole_rows(tmp):
    """Rollouts, preferences and a teacher's tokens, in rows of several samples that chunks cut; every measure, and the gradients.
    Weights are functions of a token, of a sample (its ratio, its log-probability and that of the other answer), or of a row."""
    model, data = setting(tmp, "llama")
    seen = test_policy.write(os.path.join(tmp, "rollouts.jsonl"), test_policy.rollouts())
    pairs = test_preference.write_pairs(os.path.join(tmp, "pairs.jsonl"))
    rows = {"data__eval": "", "train__batch_size": 2, "train__micro_batch": 1, "train__steps": 2, "train__warmup": 0}
    teacher = os.path.join(tmp, "teacher")
    seed = run_in(tmp, "seed", model, data, keys(0, train__steps=1, checkpoint__save="weights"))
    ini = write_ini(teacher + ".ini", base(os.path.join(seed, "checkpoint-1"), data, tmp, **keys(0, model__init="weights")))
    megatrain("-q", "score", ini, "--data", data, "--out", teacher, "--top", 5)
    cases = [("distill", data, SEQ, {"train__objective": "distill", "distill__teacher": teacher + ".top", "distill__top": 3,
                                     "distill__temperature": 2})]
    cases += [(loss, seen, 64, {"policy__loss": loss, **POLICY, **over}) for loss, over in (
        ("grpo", {}), ("dapo", {"policy__mismatch": "row"}), ("bnpo", {}), ("gspo", {}), ("gspo", ONE_POLICY))]
    cases += [(loss, pairs, 192, {"preference__loss": loss, **over}) for loss, over in (
        ("sigmoid", {"preference__sft_tokens": "all", "preference__sft": 0.5}), ("kto", {}))]
    for i, (name, of, seq, over) in enumerate(cases):
        whole, cut = (run_in(tmp, f"{i}-{chunk}", model, of, {**rows, **over, "data__seq_len": seq, "train__chunk": chunk,
                             "checkpoint__every": 1}, env=POISON) for chunk in (0, seq // 16))
        for a, b in zip(*([m for m in metrics(out) if "loss" in m] for out in (whole, cut))):
            same = {k for k in a if "/" in k or k in ("loss", "grad_norm", "reward", "kl", "entropy", "nll_loss", "loss_tokens")}
            least = {k: 1e-7 if k.startswith("rewards/") else 1e-9 for k in same}  # these are differences of logarithms
            assert all(abs(a[k] - b[k]) <= 1e-6 * abs(a[k]) + least[k] for k in same), (name, {k: (a[k], b[k]) for k in same})
        a, b = first_moments(whole), first_moments(cut)
        assert max(apart(b[k], a[k]) for k in a) <= 1e-5, name


def routers_count_no_padding(tmp):
    """Rows of fewer tokens than chunks are padded, and what balances experts is of the rows' own tokens. Measured: 2e-7, 2e-8."""
    model, data = write_model(os.path.join(tmp, "mixture"), config("qwen3_moe", num_hidden_layers=2)), os.path.join(tmp, "short.jsonl")
    write_data(data, n=24, longest=9)
    got = []
    for n in (1, 16, 64):
        out = run_in(tmp, f"short-{n}", model, data, keys(SEQ // n, data__eval="", data__packing="off", train__router_aux_loss=0.5), env=POISON)
        got.append([[m[k] for k in ("loss", "aux_loss", "grad_norm", "tokens")] for m in metrics(out) if "loss" in m])
    for of in got[1:]:
        assert all(abs(a - b) <= 2e-5 * b for x, y in zip(of, got[0]) for a, b in zip(x, y)), got


def what_chunks_cannot_do_is_refused(tmp):
    model, data = setting(tmp, "llama")
    for over, words in ((keys(48), "divide data.seq_len = 256: set it to 32"),
                        (keys(64, train__micro_batch=2), "train.micro_batch = 1"),
                        (keys(64, train__groups=4, train__batch_size=6), "train.groups = 4")):
        ini = write_ini(os.path.join(tmp, "bad.ini"), base(model, data, os.path.join(tmp, "bad"), **over))
        said = megatrain("run", ini, expect=2).stderr
        assert words in said and "train.chunk = " in said, said


def a_row_that_does_not_fit_is_told_its_chunk(tmp):
    """A plan of 8B whole on 24 GB: the longest chunk that fits is named, and does."""
    plan = lambda *more, expect=0: megatrain("plan", "--model", "Qwen3-8B", "--machine", "rtx4090", "--host-mem", "256GiB",
        "--seq-len", 262144, "--tokens-per-step", 262144, *more, expect=expect)
    said = plan(expect=None)
    named = re.search(r"train\.chunk = (\d+) ", said.stdout + said.stderr)
    assert said.returncode and named and int(named[1]) >= 16384, said.stdout + said.stderr
    fits = json.loads(plan("--set", f"train.chunk={named[1]}", "--json").stdout)
    assert fits, named[1]
    plan("--set", f"train.chunk={2 * int(named[1])}", expect=said.returncode)


def rows_of_a_million_tokens_fit(tmp):
    """8B whole on 24 GB with two drives: half a million tokens in 128 GiB, where states have to make room, and a million."""
    for tokens, memory, states in ((524288, "128GiB", "states on disk"), (1048576, "256GiB", "host")):
        p = megatrain("plan", "--model", "Qwen3-8B", "--machine", "rtx4090", "--host-mem", memory, "--nvme", "7GB/s", "--drives", 2,
                      "--seq-len", tokens, "--tokens-per-step", tokens, "--set", "train.chunk=32768", expect=None)
        assert not p.returncode and re.search(rf"memory\.states .*{states}", p.stdout), p.stdout + p.stderr


TESTS = (chunks_have_the_losses_and_gradients_of_whole_rows, placements_change_no_bit, samples_are_measured_whole,
         other_objectives_are_those_of_whole_rows, routers_count_no_padding, what_chunks_cannot_do_is_refused, a_row_that_does_not_fit_is_told_its_chunk, rows_of_a_million_tokens_fit)
if __name__ == "__main__":
    for test in chosen(TESTS):
        with tempfile.TemporaryDirectory() as tmp:
            test(tmp)
            print(f"ok {test.__name__}")
