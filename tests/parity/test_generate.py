# SPDX-License-Identifier: Apache-2.0
"""Generation from a cache. Greedy tokens are transformers' (scripts/reference/generate_fixtures.py), log-probabilities those of `score`
in all bits, and neither depends on the texts that share a pass, or on what the device has room for."""
import json
import os
import re
import struct
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from tiny import FULL, POISON, base, fixture, losses, megatrain, write_ini

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTHS = (3, 40, 17, 1, 70)
# One of each kind of layer and of weights; all with the full tests.
SCORED = ("qwen3", "mistral", "gpt_oss_mxfp4", "deepseek_v3", "qwen3_next", "granite4")


def ini(tmp, family, name="a", **over):
    data = os.path.join(tmp, "scored.jsonl")
    return write_ini(os.path.join(tmp, name + ".ini"), base(fixture(family), data, os.path.join(tmp, "o"), **{
        "model__init": "weights", "data__eval": "", "data__seq_len": 256, **over}))


def generate(tmp, config, prompts, *args, **over):
    path = os.path.join(tmp, "prompts.jsonl")
    with open(path, "w") as f:
        f.writelines(json.dumps({"prompt_ids": p}) + "\n" for p in prompts)
    said = megatrain("generate", config, "--prompts", path, *args, **over)
    return [json.loads(line) for line in said.stdout.splitlines()], said.stderr


def bits(x):
    return struct.pack("<f", x)


def scored(tmp, config, rows):
    """token_logprobs of the completions."""
    data, out = os.path.join(tmp, "scored.jsonl"), os.path.join(tmp, "scores.jsonl")
    with open(data, "w") as f:
        for r in rows:
            f.write(json.dumps({"input_ids": r["prompt_ids"] + r["completion_ids"],
                                "labels": [-100] * len(r["prompt_ids"]) + r["completion_ids"]}) + "\n")
    megatrain("-q", "score", config, "--data", data, "--out", out, "--tokens", "--force")
    with open(out) as f:
        return [json.loads(line)["token_logprobs"] for line in f]


def prompts_of(vocab):
    return [[(7 * i + 13 * k) % (vocab - 4) + 3 for i in range(n)] for k, n in enumerate(LENGTHS)]


def same_tokens_as_transformers(tmp, family, want):
    got, _ = generate(tmp, ini(tmp, family), want["prompts"], "--temperature", 0, "--max-tokens", want["max_tokens"], "--batch", 4)
    for row, ids in zip(got, want["completions"]):
        assert row["completion_ids"] == ids, (family, row["completion_ids"], ids)


def as_score_and_everywhere(tmp, family, vocab, **of):
    args = ("--max-tokens", 40, "--samples", 2, "--seed", 7, "--top-k", vocab // 2)
    rows, said = generate(tmp, ini(tmp, family, **of), prompts_of(vocab), *args, "--batch", 3, env=POISON)
    for row, logprobs in zip(rows, scored(tmp, ini(tmp, family, **of), rows)):
        assert [bits(x) for x in row["logprobs"]] == [bits(x) for x in logprobs], (family, row["logprobs"], logprobs)
    assert len({tuple(r["completion_ids"]) for r in rows}) > len(LENGTHS), family  # samples differ
    assert generate(tmp, ini(tmp, family, **of), prompts_of(vocab), *args, "--batch", 10, "--guesses", 0)[0] == rows, family
    # what does not fit streams, weights and the cache
    low, high = 256, 1 << 14
    while high - low > 32:
        middle = (low + high) // 2
        ok = not megatrain("-q", "generate", ini(tmp, family, "b", **of, memory__device_budget=f"{middle}KiB"), "--prompts",
                           os.path.join(tmp, "prompts.jsonl"), *args, "--batch", 3, "--dry-run", expect=None).returncode
        low, high = (low, middle) if ok else (middle, high)
    small, more = generate(tmp, ini(tmp, family, "b", **of, memory__device_budget=f"{high}KiB"), prompts_of(vocab), *args, "--batch", 3, env=POISON)
    assert small == rows, family
    loaded = [float(s.split(" and ")[1].split()[0]) * {"B": 1, "KiB": 1024, "MiB": 1 << 20}[s.split(" and ")[1].split()[1]] for s in (said, more)]
    assert loaded[1] > 5 * loaded[0], (family, loaded)
    if of:
        assert generate(tmp, ini(tmp, family, **{k: v for k, v in of.items() if "adapter" not in k}), prompts_of(vocab), *args)[0] != rows
        assert generate(tmp, ini(tmp, family, "c", **of, device__gpus=2), prompts_of(vocab), *args, "--batch", 3)[0] == rows


def guesses_change_no_bit(tmp, family, vocab):
    """Of texts that repeat themselves most are right, of others some: also where a window's blocks are used again."""
    for temperature in 0, 0.3:
        args = ("--max-tokens", 250 if family == "mistral" else 60, "--seed", 7, "--temperature", temperature, "--batch", 3)
        (plain, before), (rows, said) = (generate(tmp, ini(tmp, family), prompts_of(vocab), *args, "--guesses", n, env=POISON) for n in (0, 15))
        assert rows == plain, (family, temperature)
        passes = [int(re.search(r"in (\d+) passes", s).group(1)) for s in (before, said)]
        if family in ("qwen3_next", "granite4"):  # states of recurrences have none
            assert passes[0] == passes[1] and "guesses" not in said, said
            continue
        right, guessed = map(int, re.search(r"(\d+) of (\d+) guesses", said).groups())
        assert 0 < right < guessed and passes[1] < (1 if temperature else 0.8) * passes[0] + 1, (family, temperature, passes, said)


def latents_make_keys_and_values_again(tmp):
    """A cache of latents has the bits of one of keys and values, and of score, over several blocks, shared or streamed, in a fifth of the
    memory. FP8 would give products of other rows other scales."""
    args = ("--max-tokens", 80, "--seed", 7, "--samples", 3, "--batch", 4)
    prompts = [*prompts_of(96), list(range(3, 73)) * 2]
    (plain, _), (rows, _) = (generate(tmp, ini(tmp, "deepseek_v3", memory__latent_cache=on), prompts, *args, env=POISON) for on in ("off", "on"))
    assert rows == plain
    for row, logprobs in zip(rows, scored(tmp, ini(tmp, "deepseek_v3"), rows)):
        assert [bits(x) for x in row["logprobs"]] == [bits(x) for x in logprobs], (row["logprobs"], logprobs)
    small = ini(tmp, "deepseek_v3", "b", memory__latent_cache="on", memory__device_budget="6100KiB", memory__slots=2)
    assert generate(tmp, small, prompts, *args, env=POISON)[0] == rows
    kib = []
    for on in "off", "on":
        said = megatrain("generate", ini(tmp, "deepseek_v3", memory__latent_cache=on), "--prompts", os.path.join(tmp, "prompts.jsonl"), *args, "--dry-run")
        size, unit = re.search(r"keys and values +([0-9.]+) ([KM])iB", said.stdout + said.stderr).groups()
        kib.append(float(size) * (1024 if unit == "M" else 1))
    assert kib[1] < kib[0] / 4, kib
    fp8 = ini(tmp, "deepseek_v3", memory__latent_cache="on", model__compute="fp8")
    assert "memory.latent_cache" in megatrain("generate", fp8, "--prompts", os.path.join(tmp, "prompts.jsonl"), expect=2).stderr


def whatever_stays_is_planned(tmp):
    """Each budget from where few weights stay to where all do."""
    generate(tmp, ini(tmp, "qwen3_next"), [[5] * 16] * 4, "--max-tokens", 1)
    for kib in range(1000, 1400, 24):
        halves = ini(tmp, "qwen3_next", "b", model__dtype="bf16", memory__unit="half", memory__device_budget=f"{kib}KiB")
        megatrain("-q", "generate", halves, "--prompts", os.path.join(tmp, "prompts.jsonl"), "--max-tokens", 40, "--guesses", 0, "--batch", 4, "--dry-run")


def a_resumed_run_may_generate_otherwise(tmp):
    """What a cache holds is no part of what is trained."""
    with open(os.path.join(tmp, "scored.jsonl"), "w") as f:
        f.writelines(json.dumps({"input_ids": [3 + (k * i) % 90 for i in range(40)]}) + "\n" for k in range(1, 9))
    got = []
    for other in "off", "on":
        out = os.path.join(tmp, "other-" + other)
        path = ini(tmp, "deepseek_v3", "other", checkpoint__dir=out, train__steps=2)
        megatrain("-q", "run", path, "--max-steps", 1)
        megatrain("-q", "run", path, "--resume", "--set", "memory.latent_cache=" + other)
        got.append(losses(out))
    assert got[0] == got[1] and len(got[0]) == 2, got


def texts_of_a_prompt_share_its_blocks(tmp):
    args = ("--max-tokens", 4, "--samples", 8, "--seed", 3, "--guesses", 0)
    alone, together = (generate(tmp, ini(tmp, "llama"), [list(range(3, 43)) * 5] * 2, *args, "--batch", n) for n in (1, 16))
    assert together[0] == alone[0]
    computed = [int(said.split("; ")[1].split()[0]) for _, said in (alone, together)]
    n = sum(len(row["completion_ids"]) - 1 for row in alone[0])
    assert computed == [16 * 200 + n, 2 * (200 + 7 * 8) + n], (computed, n)  # 12 blocks of 16 tokens are shared


def with_adapters_over_a_packed_base(tmp):
    text = os.path.join(tmp, "text.jsonl")
    with open(text, "w") as f:
        f.writelines(json.dumps({"input_ids": p * 3}) + "\n" for p in prompts_of(90) * 4)
    over = {"model__base_dtype": "nf4", "adapter__kind": "lora"}
    megatrain("-q", "run", write_ini(os.path.join(tmp, "t.ini"), base(fixture("qwen3"), text, os.path.join(tmp, "lora"), **{
        "model__init": "weights", "data__eval": "", "data__seq_len": 256, "train__steps": 4, "train__learning_rate": "1e-1", **over})))
    as_score_and_everywhere(tmp, "qwen3", 90, adapter__path=os.path.join(tmp, "lora", "latest"), **over)


def main(tmp, families):
    with open(os.path.join(HERE, "generate.json")) as f:
        expected = json.load(f)
    for family, want in expected["models"].items():
        if not families or family in families:
            same_tokens_as_transformers(tmp, family, want)
    if not families:
        texts_of_a_prompt_share_its_blocks(tmp)
        whatever_stays_is_planned(tmp)
        latents_make_keys_and_values_again(tmp)
        a_resumed_run_may_generate_otherwise(tmp)
        with_adapters_over_a_packed_base(tmp)
    for family in families or ((*expected["models"], "fp8", "gpt_oss_mxfp4", "gemma4_moe") if FULL else SCORED):
        with open(os.path.join(HERE, family, "config.json")) as f:
            vocab = json.load(f)["vocab_size"]
        as_score_and_everywhere(tmp, family, vocab)
        guesses_change_no_bit(tmp, family, vocab)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp, sys.argv[1:])
