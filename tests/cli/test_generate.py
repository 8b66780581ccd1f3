# SPDX-License-Identifier: Apache-2.0
"""What `generate` reads and writes: texts, chats and token ids in, rollouts out; stop strings; what it refuses. Its numbers are
compared in parity/test_generate.py."""
import json
import os
import re
import tempfile

from tiny import base, config, megatrain, metrics, with_weights, write_data, write_ini, write_model

PROMPTS = ({"prompt": "ab", "id": 7}, {"messages": [{"role": "user", "content": "cdefg"}]}, {"prompt_ids": [256, 97, 98]}, {"prompt": "habc"})
ARGS = ("--temperature", 3, "--seed", 5, "--max-tokens", 24)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def generate(model, path, *args, **over):
    return lines(megatrain("-q", "generate", model, "--prompts", path, *args, **over).stdout)


def prompts(tmp, rows):
    path = os.path.join(tmp, "prompts.jsonl")
    with open(path, "w") as f:
        f.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return path


def texts_of_all_kinds_of_prompts(tmp, model):
    path, out = prompts(tmp, (p for p in PROMPTS if "messages" not in p)), os.path.join(tmp, "out.jsonl")
    rows = generate(model, path, *ARGS, "--samples", 3)
    assert [(r["group"], r["sample"]) for r in rows] == [(g, s) for g in range(3) for s in range(3)]
    assert rows[0]["id"] == 7 and "place" not in rows[0] and rows[0]["prompt_ids"] == rows[4]["prompt_ids"] == [256, 97, 98]
    assert rows[3]["completion_ids"] != rows[0]["completion_ids"]  # another text of the same prompt
    for r in rows:
        n = len(r["completion_ids"])
        assert n == len(r["logprobs"]) <= 25 and all(x <= 0 for x in r["logprobs"]) and r["truncated"] == (r["finish_reason"] == "length")
        assert (r["completion_ids"][-1] >= 256) == (not r["truncated"]) and n - (not r["truncated"]) <= 24, r
    megatrain("-q", "generate", model, "--prompts", path, *ARGS, "--samples", 3, "--batch", 2, "--out", out)
    with open(out) as f:
        assert lines(f.read()) == rows
    few = generate(model, path, *ARGS, "--min-p", 0.9999)
    assert few == generate(model, path, *ARGS[2:], "--temperature", 3, "--top-k", 1)  # no other is as likely as the first
    assert generate(model, path, *ARGS, "--max-tokens", 0)[0]["completion_ids"] == []
    return path, rows


def texts_end_before_a_stop_string(path, model, rows):
    stop = next(i for r in rows for i in r["completion_ids"][1:] if 47 < i < 123 and i != 92)  # a byte as JSON shows it
    ends = 0
    for was, now in zip(rows, generate(model, path, *ARGS, "--samples", 3, "--stop", chr(stop))):
        ids = was["completion_ids"]
        k = ids.index(stop) + 1 if stop in ids else len(ids)
        assert now["completion_ids"] == ids[:k] and now["logprobs"] == was["logprobs"][:k], (stop, was, now)
        assert stop not in ids or (not now["truncated"] and was["completion"].startswith(now["completion"])), (was, now)
        assert stop in ids or now == was
        ends += stop in ids
    assert ends
    likeliest = ("--temperature", 0, "--max-tokens", 24)  # they repeat themselves: several tokens of a pass may be behind the string
    text = generate(model, path, *likeliest)[0]["completion"]
    stopped = [generate(model, path, *likeliest, "--stop", text[2:14], "--guesses", n) for n in (0, 15)]
    assert stopped[0] == stopped[1] and 0 < len(stopped[0][0]["completion_ids"]) < 24, (text, stopped)


def a_policy_learns_from_its_own_texts(tmp, model, path):
    """The sampler's log-probabilities are the trainer's: no ratio is off 1, so that even the strictest limit drops nothing."""
    keys = {"policy__loss": "grpo", "policy__old": "batch", "policy__mismatch": "row", "policy__mismatch_max": 1, "policy__temperature": 3,
            "policy__max_tokens": 24, "train__steps": 1, "train__warmup": 0, "data__eval": "", "model__init": "weights",
            "data__tokenizer": "byte", "data__format": "rollouts"}
    data, ini = os.path.join(tmp, "rollouts.jsonl"), os.path.join(tmp, "policy.ini")
    write_ini(ini, base(model, data, os.path.join(tmp, "learnt"), **keys))
    sampled = generate(ini, path, "--seed", 5, "--max-tokens", 24, "--samples", 4)
    assert sampled[0]["temperature"] == 3
    with open(data, "w") as f:
        for i, r in enumerate(sampled):
            f.write(json.dumps({**r, "reward": i % 3}) + "\n")
    megatrain("-q", "run", ini)
    last = [m for m in metrics(os.path.join(tmp, "learnt")) if "loss" in m][-1]
    assert last["sampling/importance_sampling_ratio/mean"] == 1, last
    rows = generate(ini, path, "--seed", 5, "--max-tokens", 24, "--samples", 4, "--set", "policy.temperature=1", "--temperature", 3)
    keys.update(train__steps=0, train__batch_size=0, train__tokens_per_step=64, train__groups=2, data__train="")  # of training alone
    again = generate(write_ini(ini, base(model, data, os.path.join(tmp, "learnt"), **keys)), path, "--seed", 5, "--max-tokens", 24, "--samples", 4)
    assert again == sampled and rows[0]["logprobs"] != again[0]["logprobs"]


def log_probabilities_of_another_temperature_are_not_trained_on(tmp, model, path):
    """Texts drawn at 3, with log-probabilities of temperature 1: no policy.temperature fits both, so that they count for none."""
    data, ini = os.path.join(tmp, "at-1.jsonl"), os.path.join(tmp, "at-1.ini")
    rows = generate(model, path, *ARGS, "--samples", 2)
    assert all(r["temperature"] == 3 and r["logprobs_temperature"] == 1 for r in rows)
    assert "logprobs_temperature" not in generate(model, path, *ARGS[2:], "--temperature", 1)[0]
    with open(data, "w") as f:
        f.writelines(json.dumps({**r, "reward": i % 2}) + "\n" for i, r in enumerate(rows))
    keys = {"policy__loss": "dapo", "policy__temperature": 3, "train__steps": 1, "data__eval": "", "model__init": "weights",
            "data__tokenizer": "byte", "data__format": "rollouts"}
    for over in {"policy__old": "file"}, {"policy__mismatch": "token"}, {}:
        write_ini(ini, base(model, data, os.path.join(tmp, "at-1"), **keys, **over))
        said = megatrain("-q", "run", ini, expect=3 if over else 0).stderr
        assert not over or "policy.temperature" in said, said


def planned(*args):
    return json.loads(megatrain("plan", *args, "--machine", "rtx4090", "--generate", 1000, "--json").stdout)


def generation_is_planned(configs):
    """Passes take what memory and the link take at least; few texts leave room for weights, many for none."""
    p = planned("--model", os.path.join(configs, "models", "Meta-Llama-3-8B.json"))
    rows = {r["texts"]: r for r in p["by_texts"]}
    weights, cache, memory, link = 16e9, 131072 * 1000, 1.01e12, 32e9  # bytes; of a text; bytes/s that no RTX 4090 exceeds
    for n, r in rows.items():
        assert abs(r["tokens_per_second"] * r["pass_seconds"] - n) < 1e-6 * n
        there, streams = weights + n * cache * r["caches_on_device"], weights * (1 - r["weights_on_device"])
        assert r["pass_seconds"] > max(there / memory, 0.9 * streams / link), r
    assert rows[1]["weights_on_device"] == 1 and rows[1]["pass_seconds"] < 2 * weights / memory
    assert rows[256]["weights_on_device"] < 0.2 and rows[256]["bound_by"] == "H2D link" and 256 < max(rows)
    assert p["best_texts"] == max(rows, key=lambda n: rows[n]["tokens_per_second"]) and "round" not in p
    assert p["cache_bytes_of_a_token"] == 131072 and p["cache_of"] == "keys and values"
    p = planned("--model", os.path.join(configs, "models", "DeepSeek-V2-Lite.json"), "--host-mem", "64GiB", "--set", "memory.latent_cache=on")
    assert p["cache_bytes_of_a_token"] == 27 * 2 * (512 + 64) and p["cache_of"] == "latents"
    p = planned("--model", os.path.join(configs, "models", "gpt-oss-120b.json"), "--host-mem", "128GiB")
    assert 1280 < p["best_texts"] < 1536 and p["tokens_per_second"] > 256, p  # the most that there is memory for
    of = planned(os.path.join(configs, "grpo_qwen3.ini"))["round"]
    assert of["texts"] == 64 and of["generate_seconds"] > 1 < of["train_seconds"], of


def codes_stay_where_decoded_weights_do_not(model, path, configs):
    """The same texts, from weights that stay decoded, as codes, or not at all: buffers of six layers, six and three."""
    said = {}
    for budget in "64MiB", "1200KiB", "900KiB":
        args = (model, "--prompts", path, *ARGS, "--set", "model.base_dtype=nf4", "--set", "model.dtype=bf16", "--set",
                f"memory.device_budget={budget}")
        p = megatrain("generate", *args, "--dry-run")
        size, unit = re.search(r"weight slots +([0-9.]+) ([KM])iB", p.stdout + p.stderr).groups()
        said[budget] = float(size) * (1024 if unit == "M" else 1), lines(megatrain("-q", "generate", *args).stdout)
    (decoded, want), (codes, same), (few, again) = said.values()
    assert want == same == again and want
    assert 0.2 * decoded < codes < 0.4 * decoded and few <= codes / 2, (decoded, codes, few)
    rows = {r["texts"]: r for r in planned("--model", os.path.join(configs, "models", "Qwen3-32B.json"), "--set", "model.base_dtype=nf4",
                                           "--host-mem", "128GiB")["by_texts"]}
    assert rows[8]["weights_on_device"] == 1 and rows[8]["tokens_per_second"] > 250 and rows[128]["weights_on_device"] < 0.2, rows
    p = planned("--model", os.path.join(configs, "models", "Qwen3-8B.json"), "--set", "model.base_dtype=nf4", "--host-mem", "128GiB")
    assert 0.6 < p["tokens_per_second"] / 4463 < 1, p  # of what 900 GB/s of weights and caches allow


def as_many_texts_share_a_pass_as_are_fastest(tmp, model):
    """As many as keep their caches on the device, with the same tokens. By a profile: test_plan.py."""
    path = prompts(tmp, ({"prompt_ids": list(range(1, 2 + i))} for i in range(40)))

    def share(*args):
        p = megatrain("-vv", "generate", model, "--prompts", path, *ARGS, *args, env={"XDG_CACHE_HOME": os.path.join(tmp, "none")})
        found = re.search(r"(\d+) texts share a pass", p.stderr)
        return int(found[1]) if found else 0, lines(p.stdout)

    most, given = share(), share("--batch", 4)
    less, few = (share("--set", f"memory.device_budget={kib}KiB") for kib in (4400, 1400))
    assert (most[0], given[0]) == (40, 0) and 16 < less[0] < 40 and 0 < few[0] < 16, (most[0], given[0], less[0], few[0])
    assert most[1] == given[1] == less[1] == few[1]


def what_cannot_be_is_refused(tmp, model):
    for row, words in (('{"prompt_ids": [1, -2]}', ":1: \"prompt_ids\""), ('{"prompt_ids": []}', "no token"), ('{"prompt_ids": [99999]}', "vocab_size"),
                       ("[]", ":1: a prompt is"), ("", "no prompt")):
        assert words in megatrain("generate", model, "--prompts", prompts(tmp, [row]), expect=3).stderr, row
    path = prompts(tmp, [{"prompt_ids": [1]}])
    assert "no tokenizer" in megatrain("generate", model, "--prompts", path, "--stop", "a", expect=2).stderr
    assert "--prompts" in megatrain("generate", model, expect=2).stderr
    assert "give one of them" in megatrain("generate", model, "--model", model, "--prompts", path, expect=2).stderr
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for turns, warns in ((chat, True), (chat[:1], False)):
        args = "generate", model, "--prompts", prompts(tmp, [{"messages": chat[:1]}, {"messages": turns}]), "--template", "chatml", "--dry-run"
        assert ("turn: 1, the first in line 2" in megatrain(*args).stderr) == warns, turns
    path = prompts(tmp, [{"prompt_ids": [1]}])
    said = megatrain("generate", model, "--prompts", path, "--dry-run")
    assert "keys and values" in said.stdout + said.stderr


with tempfile.TemporaryDirectory() as tmp:
    folder, data = write_model(os.path.join(tmp, "m"), config("qwen3", num_hidden_layers=2)), os.path.join(tmp, "d.txt")
    with open(data, "w") as f:
        f.write("abcdefgh" * 400)
    megatrain("-q", "run", write_ini(os.path.join(tmp, "a.ini"), base(folder, data, os.path.join(tmp, "o"), train__steps=8, data__tokenizer="byte",
                                                                      train__learning_rate="3e-3", checkpoint__save="weights")))
    model = os.path.join(tmp, "o", "latest")
    path, rows = texts_of_all_kinds_of_prompts(tmp, model)
    texts_end_before_a_stop_string(path, model, rows)
    a_policy_learns_from_its_own_texts(tmp, model, path)
    log_probabilities_of_another_temperature_are_not_trained_on(tmp, model, path)
    as_many_texts_share_a_pass_as_are_fastest(tmp, model)
    what_cannot_be_is_refused(tmp, model)
    configs = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "configs")
    generation_is_planned(configs)
    wide = write_model(os.path.join(tmp, "wide"), config("qwen3", hidden_size=64, intermediate_size=256, num_hidden_layers=6))
    wide = with_weights(tmp, wide, write_data(os.path.join(tmp, "ids.jsonl")))
    codes_stay_where_decoded_weights_do_not(wide, prompts(tmp, [{"prompt_ids": [1, 2, 3]}, {"prompt_ids": [4]}]), configs)
