# SPDX-License-Identifier: Apache-2.0
"""Evolution strategies (policy.loss = es): weights after each step are those that its formula makes of the rewards; texts are
those of weights that were perturbed here; wherever weights are, and after kills, the bits are the same; a model learns."""
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time

from same_bits import DRIVE, LORA, PIECES, POISON
from test_policy_rounds import ROOT, ini_of, script, write_prompts
from tiny import BINARY, base, chosen, config, megatrain, metrics, planes, read_safetensors, with_weights, write_data, write_ini, \
    write_model, write_safetensors

STEPS, SEED, EPS, RATE, PROMPTS, SAMPLES, NOISES = 3, 42, 0.03, 2e-3, 3, 2, 2
#: a number that is another one for nearly every text
JUDGE = "import json, sys\nfor line in sys.stdin:\n    print(sum(json.loads(line)['completion_ids']) / 100)\n"
ES = {"policy__loss": "es", "optimizer__type": "mezo", "train__grad_clip": 0, "mezo__samples": NOISES, "mezo__eps": EPS, "mezo__noise": "sign",
      "policy__prompts_per_round": PROMPTS, "policy__samples": SAMPLES, "train__batch_size": 2 * NOISES * PROMPTS * SAMPLES,
      "train__learning_rate": RATE, "model__init": "weights", "optimizer__weight_decay": 0}
LOW = 0xffffffff


def es_ini(tmp, name, model, **over):
    return ini_of(tmp, name, model, "generate", **{**ES, "policy__reward": f"{sys.executable} {script(tmp, 'judge.py', JUDGE)}", **over})


def philox(seed, stream, index):
    """The words of a block of Philox4x32-10."""
    c, k = [index & LOW, index >> 32, stream & LOW, stream >> 32], [seed & LOW, seed >> 32]
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 ^ c[1] ^ k[0], q & LOW, p >> 32 ^ c[3] ^ k[1], p & LOW]
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return c


def signs(n, number, step, sample):
    """The noise of a tensor's n elements."""
    words = [w for i in range((n + 127) // 128) for w in philox(SEED, 0xA9 << 56 | step << 24 | number, sample << 48 | i)]
    return [-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(n)]


def rows_of(out, k):
    with open(f"{out}/round-{k}.jsonl") as f:
        return [json.loads(line) for line in f]


def slopes(out, k):
    """Of each noise: the difference of the losses, which are rewards less, by that of the weights."""
    mean = lambda v: sum(r["reward"] for r in rows_of(out, k) if r["noise"] == v) / (PROMPTS * SAMPLES)
    return [-(mean(2 * s) - mean(2 * s + 1)) / (2 * EPS) for s in range(NOISES)]


def floats(path):
    """By name: (shape, numbers)."""
    wide = lambda dtype, data: data if dtype == "F32" else b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
    of = {name: (shape, wide(dtype, data)) for name, (dtype, shape, data) in read_safetensors(path).items()}
    return {name: (shape, struct.unpack(f"<{len(data) // 4}f", data)) for name, (shape, data) in of.items()}


def weights(out, step, adapters):
    """All that is trained, in FP32."""
    if adapters:
        return floats(f"{out}/checkpoint-{step}/adapter_model.safetensors")
    megatrain("-q", "export", f"{out}/checkpoint-{step}", f"{out}/f32-{step}", "--dtype=f32")
    return floats(f"{out}/f32-{step}/model.safetensors")


def number_of(before, after, g, step):
    """The number of a tensor's noise: that by which it has moved as it should."""
    n = min(len(before), 400)
    found = []
    for number in range(100):
        z = [signs(n, number, step, s) for s in range(NOISES)]
        want = (b - RATE * sum(g[s] * z[s][i] for s in range(NOISES)) / NOISES for i, b in enumerate(before[:n]))
        if all(abs(a - w) < 1e-5 for a, w in zip(after, want)):
            found.append(number)
    return found


def follows_its_rewards(tmp, model, adapters):
    name = "adapters" if adapters else "whole"
    ini, out = es_ini(tmp, name, model, checkpoint__every=1, **({**LORA, "model__base_dtype": "nf4"} if adapters else {}))
    megatrain("run", ini)
    at = [weights(out, k + 1, adapters) for k in range(STEPS)]
    numbers, worst = {}, 0
    for name, (shape, before) in at[0].items():
        numbers[name], = number_of(before, at[1][name][1], slopes(out, 1), 1)
        for k in range(1, STEPS):
            g, now, then = slopes(out, k), at[k - 1][name][1], at[k][name][1]
            z = [signs(len(now), numbers[name], k, s) for s in range(NOISES)]
            for i, a in enumerate(then):
                worst = max(worst, abs(a - (now[i] - RATE * sum(g[s] * z[s][i] for s in range(NOISES)) / NOISES)))
    print(f"weights differ by {worst:.1e} from those that the rewards make")
    assert worst < 1e-5 and len(set(numbers.values())) == len(numbers), (worst, numbers)
    for k, m in enumerate(m for m in metrics(out) if "loss" in m):
        norm = (sum(g * g for g in slopes(out, k)) / NOISES) ** 0.5
        assert norm > 0.1 and abs(m["grad_norm"] / norm - 1) < 1e-4, (m, norm)
        assert abs(m["reward"] - sum(r["reward"] for r in rows_of(out, k)) / len(rows_of(out, k))) < 1e-5 and m["reward_std"] > 0
    samples_by_perturbed_weights(model, out, numbers, adapters)


def samples_by_perturbed_weights(model, out, numbers, adapters):
    """The second round's texts, again by a model that is written here, of what the checkpoint has for others."""
    rows, size, file = rows_of(out, 1), 2 * NOISES, "adapter_model.safetensors" if adapters else "model.safetensors"
    start = floats(f"{out}/checkpoint-1/{file}")
    assert len({json.dumps(r["completion_ids"]) for r in rows[:size]}) > 1
    for v in range(size):
        folder = f"{out}/variant-{v}"
        subprocess.run(["cp", "-r", f"{out}/checkpoint-1", folder], check=True)
        subprocess.run(["rm", "-r", f"{folder}/megatrain"], check=True)
        tensors = {}
        for name, (shape, w) in start.items():
            z = signs(len(w), numbers[name], 1, v // 2)
            data = struct.pack(f"<{len(w)}f", *(x + (-EPS if v % 2 else EPS) * y for x, y in zip(w, z)))
            tensors[name] = ("F32", shape, data)
        write_safetensors(f"{folder}/{file}", tensors)
        of = ["--adapter", folder, "--set", "model.base_dtype=nf4"] if adapters else ["--set", "model.dtype=f32"]
        p = megatrain("-q", "generate", model if adapters else folder, *of, "--set", "model.dtype=f32", "--prompts",
                      f"{out}/round-1.prompts.jsonl", "--samples", SAMPLES, "--max-tokens", 6, "--seed", SEED * 1000003 + 1)
        for a, b in zip((json.loads(line) for line in p.stdout.splitlines()), rows[v::size]):
            assert a["group"] == b["group"] and b["noise"] == v
            assert a["completion_ids"] == b["completion_ids"], (v, a, b)
            assert max(abs(x - y) for x, y in zip(a["logprobs"], b["logprobs"])) < 1e-4, (v, a, b)


def whole_models_follow_their_rewards(tmp, model):
    follows_its_rewards(tmp, model, False)


def adapters_follow_their_rewards(tmp, model):
    follows_its_rewards(tmp, model, True)


def result(out):
    """Texts with their rewards, losses, and all bytes of the last state."""
    return [rows_of(out, k) for k in range(STEPS)], [(m["loss"], m["grad_norm"]) for m in metrics(out) if "loss" in m], \
        planes(f"{out}/checkpoint-{STEPS}")


def kill(ini, out):
    """In generation, in the judge, in training, and after it."""
    files = ("round-0.prompts.jsonl", "round-0.jsonl.rewards", "round-0.jsonl", "checkpoint-1", "round-1.prompts.jsonl", "round-2.jsonl")
    for name in files:
        p = None
        for _ in range(100):  # what was killed may still be dying, with the folder's lock
            p = subprocess.Popen([BINARY, "-q", "run", ini] + ([] if name == files[0] else ["--resume"]), start_new_session=True,
                                 stderr=subprocess.DEVNULL)
            while not os.path.exists(f"{out}/{name}") and p.poll() is None:
                time.sleep(0.001)
            if os.path.exists(f"{out}/{name}"):
                break
            time.sleep(0.1)
        assert p.poll() is None, name
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    for _ in range(50):
        if not megatrain("-q", "run", ini, "--resume", expect=None).returncode:
            break
        time.sleep(0.1)


def places_and_kills_change_no_bit(tmp, model):
    os.makedirs(f"{tmp}/drive")
    little = {"memory__device_budget": "1600KiB"}
    places = {"little": (POISON, little), "halves": (POISON, {"memory__unit": "half", "memory__slots": 2, "device__cpu_threads": 1}),
              "drive": (PIECES, {**DRIVE, "memory__nvme_paths": f"{tmp}/drive", **little})}
    adapters = {"resident": (POISON, {"memory__adapters": "resident", **little})}
    slow = f"{sys.executable} {script(tmp, 'slow.py', 'import time; time.sleep(0.2)' + chr(10) + JUDGE)}"
    mixture = with_weights(tmp, write_model(f"{tmp}/experts", config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])),
                           f"{tmp}/ids.jsonl", "mixture")
    for kind, of, common, cases in (("mixture", mixture, {"mezo__layers": 0.5}, places), ("adapters", model, LORA, adapters)):
        common = {"model__dtype": "bf16", **common}
        ini, out = es_ini(tmp, f"plain-{kind}", of, **common)
        megatrain("-q", "run", ini)
        want = result(out)
        assert len(want[1]) == STEPS and all(norm > 0 for _, norm in want[1])
        for name, (env, over) in cases.items():
            ini, out = es_ini(tmp, f"{name}-{kind}", of, **{**common, **over})
            megatrain("-q", "run", ini, env=env)
            assert result(out) == want, (kind, name)
        ini, out = es_ini(tmp, f"set-{kind}", of, **{**common, "mezo__eps": 0.5})
        megatrain("-q", "run", ini, "--set", f"mezo.eps={EPS}")  # own generation gets the same --set
        assert result(out) == want, kind
        ini, out = es_ini(tmp, f"killed-{kind}", of, **{**common, "policy__reward": slow})
        kill(ini, out)
        assert result(out) == want, kind


def texts_that_are_left_out_move_nothing(tmp, model):
    """All of them are cut off: a step without a loss, which is not one that failed."""
    ini, out = es_ini(tmp, "left-out", model, policy__truncated="mask", policy__max_tokens=1)
    megatrain("-q", "run", ini)
    rows, steps = [r for k in range(STEPS) for r in rows_of(out, k)], [m for m in metrics(out) if "loss" in m]
    assert all(r["truncated"] for r in rows) and len({r["reward"] for r in rows}) > 2
    assert [(m["loss"], m["grad_norm"], m["skipped"]) for m in steps] == [(0, 0, False)] * STEPS, steps


def what_cannot_be_is_refused(tmp, model):
    for over, *words in (
            ({"optimizer__type": "adamw", "mezo__samples": 1, "mezo__eps": 1e-3, "mezo__noise": "normal"}, "policy.loss = es", "set optimizer.type = mezo"),
            ({"policy__loss": "dapo"}, "policy.loss", "or policy.loss = es"), ({"mezo__small": 0.5}, "mezo.small", "set it to 1"),
            ({"policy__kl_weight": 0.1}, "policy.kl_weight", "remove them"), ({"policy__old": "file"}, "policy.old = file"),
            ({"policy__rollouts": "true"}, "policy.rollouts = true", "set it to generate"),
            ({"train__batch_size": 12}, "a step of 12 rows", "set train.batch_size = 24"),
            ({"policy__temperature": 0, "policy__loss": "dapo", "optimizer__type": "adamw", "mezo__samples": 1, "mezo__eps": 1e-3,
              "mezo__noise": "normal"}, "policy.temperature = 0", "set it to at least 0.01")):
        ini, _ = es_ini(tmp, "refused", model, **over)
        said = megatrain("run", ini, expect=2).stderr
        assert all(w in said for w in words), (words, said)
    prompts = f"{tmp}/prompts.jsonl"
    ini, _ = es_ini(tmp, "refused", model, optimizer__type="sgd", policy__loss="off", mezo__samples=1, mezo__eps=1e-3, mezo__noise="normal")
    assert "--noise is of optimizer.type = mezo" in megatrain("generate", ini, "--prompts", prompts, "--noise", 0, expect=2).stderr
    with open(f"{tmp}/quiet.jsonl", "w") as f:
        f.writelines(json.dumps({"prompt_ids": [65], "completion_ids": [66], "group": 1, "reward": i}) + "\n" for i in range(24))
    ini, _ = es_ini(tmp, "refused", model, policy__rollouts="", data__train=f"{tmp}/quiet.jsonl")
    ini = ini.replace(".ini", "-file.ini")
    write_ini(ini, base(model, f"{tmp}/quiet.jsonl", f"{tmp}/refused", **{**ES, "data__eval": "", "data__format": "rollouts"}))
    said = megatrain("run", ini, expect=None).stderr
    assert 'quiet.jsonl:1: the rollout has no "noise"' in said, said


def it_learns(tmp):
    """The demo's policy on a fraction of its model: greedy answers to held-out prompts, by all weights."""
    env = {"DEMO_OUT": f"{tmp}/demo"}
    subprocess.run([sys.executable, f"{ROOT}/scripts/policy_demo.py"], env={**os.environ, **env}, check=True)
    shape = write_model(f"{tmp}/small", config("qwen3", hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32,
                                               tie_word_embeddings=True))
    megatrain("-q", "run", f"{ROOT}/configs/demo_policy_start.ini", "--set", f"model.path={shape}", env=env)
    sets = {"policy.loss": "es", "policy.samples": 1, "optimizer.type": "mezo", "optimizer.beta2": "auto", "mezo.samples": 32, "mezo.eps": 0.01,
            "mezo.noise": "sign", "train.grad_clip": 0, "train.batch_size": 1024, "train.learning_rate": 3e-3, "train.steps": 40}
    for seed in (1, 2, 3):
        out = f"{tmp}/learnt-{seed}"
        words = [w for k, v in {**sets, "train.seed": seed, "checkpoint.dir": out}.items() for w in ("--set", f"{k}={v}")]
        megatrain("-q", "run", f"{ROOT}/configs/demo_policy.ini", *words, env=env)
        right = [m["eval_reward"] for m in metrics(out) if "eval_reward" in m]
        rewards = [m["reward"] for m in metrics(out) if "loss" in m]
        print(f"seed {seed}: {right[0]:.0%} to {right[-1]:.0%} of held-out prompts; sampled {sum(rewards[:10]) / 10:.3f} to {sum(rewards[-10:]) / 10:.3f}")
        assert right[-1] > right[0] and sum(rewards[-10:]) > 1.3 * sum(rewards[:10]), (seed, right, rewards)


def main(tmp):
    model = write_model(f"{tmp}/shape", config("qwen3", num_hidden_layers=2, vocab_size=260, bos_token_id=258, eos_token_id=259))
    model = with_weights(tmp, model, write_data(f"{tmp}/ids.jsonl", vocab=256))
    write_prompts(f"{tmp}/prompts.jsonl")
    for test in chosen((whole_models_follow_their_rewards, adapters_follow_their_rewards, places_and_kills_change_no_bit,
                        texts_that_are_left_out_move_nothing, what_cannot_be_is_refused, it_learns)):
        test(*[tmp, model][:test.__code__.co_argcount])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
