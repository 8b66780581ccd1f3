# SPDX-License-Identifier: Apache-2.0
"""Random combinations of features, each in two random places, some interrupted and resumed in a third: the losses and the states
of a plain run, to the bit. What is refused is refused by a message, and nothing else may fail.
  test_random_places.py [SEED [N]]   N combinations from SEED on; by default 40 of today's. The last lines count them by result."""
import collections
import os
import random
import subprocess
import sys
import tempfile
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "reference"))
import parity_families
import test_policy
import test_preference
from tiny import BINARY, POISON, base, config, losses, metrics, planes, with_weights, write_data, write_ini, write_model

os.environ.setdefault("MEGATRAIN_RESIDENT", str(32 << 20))
STEPS = 4
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
MODELS = [("qwen2", {"num_hidden_layers": 3}), ("qwen3", {"tie_word_embeddings": True}), ("qwen3", {}), ("mistral", {}),
          ("gemma3_text", {}), ("gemma4_text", {}), ("qwen3_5_text", {}), ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
          ("qwen3_moe", {}), ("qwen2_moe", {}), ("gpt_oss", {}), ("glm4_moe", {"first_k_dense_replace": 1})]
VOCAB, TEXT = 272, 100  # ids from TEXT on stand for images in some models
DIRECTIONS = ("adafactor", "muon", "apollo", "galore")
PREFERENCES = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "simpo", "orpo", "cpo", "apo_zero", "robust")
POLICIES = [loss for loss in test_policy.LOSSES if loss not in ("dr_grpo", "opd")]  # these need keys of their own


class Drawn(dict):
    """Keys of a configuration."""

    def __init__(self, r, **keys):
        super().__init__(keys)
        self.r = r

    def maybe(self, share, key, *values):
        if self.r.random() < share:
            self[key] = self.r.choice(values)


def draw_numerics(r, mixture):
    """What is computed, and what is trained: the keys, and "all", "freeze", "lora" or "dora"."""
    kind = r.choice(["all", "all", "lora", "dora", "freeze"])
    adapters = kind in ("lora", "dora")
    d = Drawn(r, train__steps=STEPS, model__dtype=r.choice(["f32", "bf16"]))
    d["optimizer__type"] = r.choice(["adamw", "adamw", "lion", "sgd", "mezo"] if adapters else
                                    ["adamw", "adamw", "adamw", "lion", "sgd", "mezo", *DIRECTIONS])
    if d["optimizer__type"] in (*DIRECTIONS, "mezo"):
        d["train__grad_clip"] = 0
    if d["optimizer__type"] == "mezo":
        d.update(mezo__samples=r.choice([1, 2]), mezo__layers=r.choice([1, 0.5]), mezo__noise=r.choice(["normal", "sign"]))
    else:
        d.maybe(0.5, "train__groups", 2)
        d.maybe(0.3, "train__chunk", 16, 32)
        d.maybe(0.3, "train__clip", "unit")
        d.maybe(0.1, "model__compute", "fp8")
    if d["optimizer__type"] not in (*DIRECTIONS, "mezo"):
        d.maybe(0.4, "optimizer__state_dtype", "bf16", "8bit")
    if d.get("optimizer__state_dtype") == "bf16":
        d.maybe(0.3, "optimizer__rounding", "stochastic")
    if d["model__dtype"] == "bf16":
        d.maybe(0.25, "optimizer__master", "bf16", "24bit")
        d.maybe(0.15, "optimizer__grad_dtype", "bf16")
    d.maybe(0.2, "optimizer__decay_embeddings", "off")
    d.maybe(0.3, "memory__logits_chunk", 64, 128)
    d.maybe(0.6, "eval__every", 1, 2)
    d.maybe(0.3, "data__packing", "off")
    d.maybe(0.5, "train__batch_size", 1, 5, 8)
    d["train__micro_batch"] = 1 if "train__chunk" in d or d.get("train__batch_size") == 1 else r.choice([1, 2, 3])
    if mixture:
        d.maybe(0.2, "train__router_aux_loss", 0.01)
    if adapters:
        d.update(model__init="weights", adapter__kind=kind, adapter__rank=r.choice([3, 4]))
        d.maybe(0.5, "model__base_dtype", "nf4", "fp8", "mxfp4", "nvfp4", "int4")
        d.maybe(0.3, "adapter__train_also", "*norm*", "lm_head*", "*embed*", "*layers.1.*q_proj*")
        d.maybe(0.2, "adapter__rslora", "on")
        d.maybe(0.2, "adapter__lr_ratio_b", 4)
        d.maybe(0.3, "adapter__targets", "q_proj, v_proj", "o_proj, down_proj", *["all-linear, *.experts.*"] * mixture)
        d.maybe(0.3, "adapter__merge_aware", d.get("model__base_dtype", "bf16"))
        if "adapter__merge_aware" in d:
            d.maybe(0.4, "adapter__merge_scale", "recomputed")
        elif kind == "lora":
            d.maybe(0.2, "adapter__dropout", 0.1)
            d.maybe(0.2, "adapter__merge_every", 2)
    elif kind == "freeze":
        d["model__freeze"] = r.choice(["model.embed_tokens*", "model.layers.0.*", "*mlp*"])
    elif r.random() < 0.3:
        d["model__share_layers"] = 2
        d.maybe(0.5, "train__delink_at", 2)
    elif r.random() < 0.3:
        d.update(model__init="weights", train__blocks=r.choice([2, "layers"]), train__block_steps=r.choice([1, 2]))
        d.maybe(0.4, "train__blocks_always", "*norm*", "*embed*", "lm_head*")
    return d, kind


def draw_objective(r, d, path):
    """Sets the objective's keys; the path of its data, written there, or None for the usual ones."""
    which = r.random()
    if which < 0.25:
        d["preference__loss"] = r.choice(PREFERENCES)
        d.maybe(0.3, "preference__sft", 0.2)
        return test_preference.write_pairs(path, seed=r.random(), vocab=TEXT)
    if which < 0.5:
        d.update(policy__loss=r.choice(POLICIES), data__format="rollouts", data__eval="")
        d.maybe(0.5, "policy__old", "file")
        d.maybe(0.4, "policy__mismatch", "token", "row")
        d.maybe(0.4, "policy__kl_weight", 0.1)
        d.maybe(0.3, "policy__kl", "k1", "k3_ratio")
        d.maybe(0.3, "policy__normalise", "tokens", "micro", "rows")
        d.maybe(0.3, "policy__scale", "group", "batch", "none")
        d.maybe(0.2, "policy__dual_clip", 3)
        d.maybe(0.3, "policy__mismatch_beyond", "drop")
        return test_policy.write(path, test_policy.rollouts(seed=r.random(), vocab=TEXT))
    return None


def draw_place(r, d, kind, drive):
    p = Drawn(r, memory__activations=r.choice(["keep", "offload", "recompute", "disk"]), memory__slots=r.choice([2, 3]),
              memory__unit=r.choice(["layer", "half"]), memory__states=r.choice(["host", "disk"]), memory__nvme_paths=drive,
              device__cpu_threads=r.choice([1, 2]))
    if "train__grad_clip" in d or "train__clip" in d:
        p.maybe(0.4, "memory__update", "forward", "backward")
    if p.get("memory__update") == "backward":
        p.maybe(0.5, "memory__update_pending", 0, 1, 2, 3)
    p.maybe(0.3, "memory__device_budget", "3MiB", "6MiB", "12MiB", "1GiB")
    p.maybe(0.2, "memory__verify", "off", "all")
    p.maybe(0.2, "memory__nvme_checksums", "off")
    p.maybe(0.3, "checkpoint__every", 1)
    p.maybe(0.2, "checkpoint__frozen", "copy", "name")
    p.maybe(0.3, "memory__embedding", "device", "host")
    p.maybe(0.2, "memory__pin", "staging")
    p.maybe(0.6, "memory__expert_group", 1, 2, 4)
    if d["optimizer__type"] != "mezo":
        p.maybe(0.4, "device__gpus", 2, 3)
    if p.get("device__gpus") == 2 and "train__groups" in d:
        p.maybe(0.6, "device__map", "units", "data")
    if kind in ("lora", "dora"):
        p.maybe(0.5, "memory__base", "host", "disk")
        p.maybe(0.5, "memory__adapters", "streamed", "resident")
    if p["memory__activations"] == "recompute":
        p.maybe(0.4, "memory__keep_layers", 1)
        p.maybe(0.4, "memory__offload_layers", 1)
        p.maybe(0.3, "memory__offload_attention", 0, 1)
    return p


def run(ini, *args, hosts=1, env=None):
    """(exit code, the last line that it said)"""
    p = subprocess.run([*(MPIRUN if hosts > 1 else []), BINARY, "-q", "run", ini, *args], capture_output=True, text=True,
                       env={**os.environ, **(env or {})})
    return p.returncode, ([line for line in p.stderr.splitlines() if "megatrain" in line] or [p.stderr[-300:]])[-1]


class Case:
    def __init__(self, seed, tmp):
        self.r, self.tmp = random.Random(seed), tmp
        family, mixture, cfg = self.draw_model()
        self.keys, self.kind = draw_numerics(self.r, mixture)
        usual = write_data(os.path.join(tmp, "usual.jsonl"), n=40, vocab=TEXT)
        self.data = draw_objective(self.r, self.keys, os.path.join(tmp, "data.jsonl")) or usual
        self.model = write_model(os.path.join(tmp, "model"), cfg)
        if self.keys.get("model__init") == "weights":
            self.model = with_weights(tmp, self.model, usual)
        self.what = f"{seed} {family} {dict(self.keys)}"

    def draw_model(self):
        if self.r.random() < 0.4:
            family, more = self.r.choice(MODELS)
            return family, "moe" in family or family == "gpt_oss", config(family, **more)
        name, family, cfg, _ = parity_families.draw(self.r)
        for c in (cfg, cfg.get("text_config", cfg)):
            c["vocab_size"] = VOCAB
        return name, family in parity_families.MIXTURES, cfg

    def ini(self, name, out, place):
        return write_ini(os.path.join(self.tmp, name + ".ini"), base(self.model, self.data, out, **{**self.keys, **place}))

    def result(self, out):
        return losses(out), planes(os.path.join(out, f"checkpoint-{STEPS}")), {m["step"]: m["eval_loss"] for m in metrics(out) if "eval_loss" in m}

    def plain(self):
        """(exit code, what it said or None, the result)"""
        out = os.path.join(self.tmp, "plain")
        code, said = run(self.ini("plain", out, {}))
        return code, said, None if code else self.result(out)

    def place(self, number, want):
        """"equal", "refused", or a description of the fault."""
        r, drive, out = self.r, os.path.join(self.tmp, "drive"), os.path.join(self.tmp, f"out{number}")
        os.makedirs(drive, exist_ok=True)
        place = draw_place(r, self.keys, self.kind, drive)
        hosts = 2 if r.random() < 0.4 and "train__groups" in self.keys else 1
        stop = r.randint(1, STEPS - 1) if r.random() < 0.4 else 0
        env = {**POISON, **({"MEGATRAIN_DISK_PIECE": "2048"} if r.random() < 0.5 else {})}
        if hosts > 1:
            place.maybe(0.4, "cluster__states", "whole")
        ini, what = self.ini(f"out{number}", out, place), f"{self.what} in {dict(place)}, {hosts} hosts, stop {stop}"
        code, said = run(ini, *(["--max-steps", str(stop)] if stop else []), hosts=hosts, env=env)
        if stop and not code:
            if r.random() < 0.3:
                place, hosts = draw_place(r, self.keys, self.kind, drive), 1
                ini, what = self.ini(f"out{number}b", out, place), f"{what}, then in {dict(place)}"
            code, said = run(ini, "--resume", hosts=hosts, env=env)
        if code:
            return "refused" if code in (2, 4) else f"exit {code}, {said}: {what}"
        got = self.result(out)
        got[2].update({} if stop in want[2] else {stop: None})  # where a run stops it evaluates
        want = want if stop in want[2] else (*want[:2], {**want[2], stop: None})
        other = [word for word, a, b in zip(("losses", "states", "evaluations"), got, want) if a != b]
        return f"other {' and '.join(other)}: {what}" if other else "equal"


def main(seed, n):
    count, faults = collections.Counter(), []
    for s in range(seed, seed + n):
        with tempfile.TemporaryDirectory() as tmp:
            case = Case(s, tmp)
            code, said, want = case.plain()
            if code:
                count["refused"] += code == 2
                faults += [f"exit {code}, {said}: {case.what}"] if code != 2 else []
                continue
            for number in range(2):
                result = case.place(number, want)
                count[result if result in ("equal", "refused") else "faults"] += 1
                faults += [result] if result not in ("equal", "refused") else []
    print("\n".join(faults))
    print(f"from seed {seed}: {dict(count)}")
    assert not faults and count["equal"] > n / 4


main(int(sys.argv[1]) if len(sys.argv) > 1 else int(time.time()) // 86400 * 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 40)
