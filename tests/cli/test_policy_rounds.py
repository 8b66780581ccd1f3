# SPDX-License-Identifier: Apache-2.0
"""A policy in rounds: a command samples, rewards are built in or a command's, a run trains; kills in each phase change no
bit; what is refused; own generation; the scripts for servers, against a stub that speaks their API."""
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from tiny import BINARY, base, chosen, config, losses, megatrain, metrics, planes, write_ini, write_model

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
STEPS = 3

#: samples by the seed alone: so rounds have the same rollouts however often they are made
SAMPLER = '''
import json, os, random, sys, time
e = os.environ
time.sleep(float(sys.argv[1]))
r = random.Random(e["MEGATRAIN_SEED"])
with open(e["MEGATRAIN_ROLLOUTS"], "w") as f:
    for line in open(e["MEGATRAIN_PROMPTS"]):
        o = json.loads(line)
        for _ in range(int(e["MEGATRAIN_SAMPLES"])):
            ids = [r.randrange(48, 58) for _ in range(r.randrange(1, int(e["MEGATRAIN_MAX_TOKENS"])))]
            f.write(json.dumps(dict(o, completion=bytes(ids).decode(), completion_ids=ids, logprobs=[-2.0] * len(ids))) + "\\n")
with open(e["MEGATRAIN_ROLLOUTS"] + ".seen", "w") as f:
    json.dump({k: v for k, v in e.items() if k.startswith("MEGATRAIN_")}, f)
sys.exit(int(sys.argv[2]))
'''
JUDGE = '''
import json, sys, time
time.sleep(float(sys.argv[1]))
for line in sys.stdin:
    print(json.dumps({"reward": json.loads(line)["completion"].count("7")}))
'''


def script(tmp, name, text):
    with open(f"{tmp}/{name}", "w") as f:
        f.write(text)
    return f"{tmp}/{name}"


def write_prompts(path, n=6):
    with open(path, "w") as f:
        f.writelines(json.dumps({"prompt_ids": [65 + i, 66], "answer": str(i), "schema": {"type": "integer", "enum": [i, 10 + i]}}) + "\n" for i in range(n))
    return path


def ini_of(tmp, name, model, rollouts, **over):
    out = f"{tmp}/{name}"
    s = base(model, f"{tmp}/none", out, **{
        "policy__loss": "dapo", "policy__rollouts": rollouts, "policy__prompts": f"{tmp}/prompts.jsonl", "policy__prompts_per_round": 4,
        "policy__samples": 3, "policy__max_tokens": 6, "policy__reward": "number", "train__steps": STEPS, "train__batch_size": 12,
        "train__micro_batch": 4, "train__schedule": "constant", "train__warmup": 0, "data__eval": "", "data__packing": "off", **over})
    del s["data"]["train"]
    return write_ini(out + ".ini", s), out


def sampler(tmp, seconds=0, code=0):
    return f"{sys.executable} {script(tmp, 'sampler.py', SAMPLER)} {seconds} {code}"


def rounds_train_on_what_they_sample(tmp, model):
    judge = script(tmp, "judge.py", JUDGE)
    for name, reward, over in (("number", "number", {}), ("regex", "regex", {}), ("exact", "exact", {}), ("schema", "schema", {}),
                               ("judge", f"{sys.executable} {judge} 0", {"policy__steps_per_round": 2, "policy__old": "file", "train__batch_size": 6,
                                                                        "train__steps": 2 * STEPS})):
        ini, out = ini_of(tmp, name, model, sampler(tmp), policy__reward=reward, **over)
        said = megatrain("run", ini).stderr
        steps = over.get("train__steps", STEPS)
        m = [x for x in metrics(out) if "loss" in x]
        assert [x["step"] for x in m] == list(range(1, steps + 1)), (name, m)
        seen, want = [], {"number": lambda o: float(o["completion"]) == float(o["answer"]), "exact": lambda o: o["completion"] == o["answer"],
                          "regex": lambda o: o["completion"].startswith(o["answer"]), "judge": lambda o: o["completion"].count("7"),
                          "schema": lambda o: int(o["completion"]) in o["schema"]["enum"]}[name]
        for k in range(STEPS):
            with open(f"{out}/round-{k}.jsonl") as f:
                rows = [json.loads(line) for line in f]
            with open(f"{out}/round-{k}.prompts.jsonl") as f:
                seen += [json.loads(line)["prompt_ids"][0] for line in f]
            assert len(rows) == 12 and len({r["group"] for r in rows}) == 4 and all(r["reward"] == want(r) for r in rows), (name, rows)
            per = steps // STEPS
            mean = sum(x["reward"] for x in m[per * k:per * (k + 1)]) / per
            assert abs(mean - sum(r["reward"] for r in rows) / 12) < 1e-6, (name, k)
            assert f"round {k}: 12 rollouts of 4 prompts" in said, said
        assert sorted(seen[:6]) == list(range(65, 71)) and sorted(seen[6:]) == list(range(65, 71)), "a prompt came twice before all came once"
        assert os.path.isdir(f"{out}/checkpoint-{steps}")
    with open(f"{tmp}/number/round-1.tmp.jsonl.seen") as f:
        told = json.load(f)
    assert told["MEGATRAIN_MODEL"].endswith("checkpoint-1") and told["MEGATRAIN_ROUND"] == "1" and not told["MEGATRAIN_ADAPTER"], told
    said = megatrain("run", f"{tmp}/number.ini", "--resume").stderr  # all is done
    assert "round" not in said or "resuming" in said


def kills_in_each_phase_change_no_bit(tmp, model):
    keys = {"policy__steps_per_round": 2, "policy__old": "file", "train__batch_size": 6, "train__steps": 6, "checkpoint__every": 1,
            "policy__reward": f"{sys.executable} {script(tmp, 'judge.py', JUDGE)} 0.1"}
    ini, whole = ini_of(tmp, "whole", model, sampler(tmp), **keys)
    megatrain("run", ini)
    ini, out = ini_of(tmp, "killed", model, sampler(tmp, 0.3), **keys)
    files = ("round-0.prompts.jsonl", "round-0.jsonl", "checkpoint-1", "round-1.prompts.jsonl", "checkpoint-3", "round-2.jsonl")
    for name in files:  # in the command, before training, between the steps of a round
        start = lambda: subprocess.Popen([BINARY, "-q", "run", ini] + ([] if name == files[0] else ["--resume"]), start_new_session=True)
        p, tries = start(), 0
        while not os.path.exists(f"{out}/{name}"):
            if p.poll() is not None:  # what was killed may still be dying, with the folder's lock
                tries += 1
                assert tries < 50, f"the run ended before {name} was there"
                time.sleep(0.1)
                p = start()
            time.sleep(0.002)
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    for _ in range(50):
        if not megatrain("run", ini, "--resume", expect=None).returncode:
            break
        time.sleep(0.1)
    assert sum(m["grad_norm"] > 0 for m in metrics(whole) if "loss" in m) > 3
    assert planes(f"{out}/checkpoint-6") == planes(f"{whole}/checkpoint-6")
    for k in range(3):
        with open(f"{out}/round-{k}.jsonl") as a, open(f"{whole}/round-{k}.jsonl") as b:
            assert a.read() == b.read()


def a_save_that_was_killed_moves_no_round(tmp, model):
    """The last one of a round, whose checkpoint was whole and had not its name yet."""
    ini, out = ini_of(tmp, "unnamed", model, sampler(tmp), policy__steps_per_round=2, policy__old="file", train__batch_size=6, train__steps=6,
                      checkpoint__every=1, policy__reward=f"{sys.executable} {script(tmp, 'judge.py', JUDGE)} 0")
    megatrain("run", ini)
    want = losses(out), planes(f"{out}/checkpoint-6")
    for name in os.listdir(out):
        if name.startswith(("round-1", "round-2")):
            os.remove(f"{out}/{name}")
        elif name.startswith("checkpoint-") and name[-1] in "3456":
            shutil.rmtree(f"{out}/{name}")
    os.rename(f"{out}/checkpoint-2", f"{out}/checkpoint-2.tmp")
    shutil.copy(f"{out}/round-0.jsonl", f"{out}/rollouts.jsonl")
    megatrain("run", ini, "--resume")
    assert (losses(out), planes(f"{out}/checkpoint-6")) == want


def an_evaluation_that_was_cut_short_is_made(tmp, model):
    """After the last step, once."""
    ini, out = ini_of(tmp, "unevaluated", model, sampler(tmp))
    held_out = ["--set", f"data.eval={out}/round-0.jsonl", "--set", "eval.every=0"]
    megatrain("run", ini)
    for _ in range(2):
        megatrain("run", ini, "--resume", *held_out)
        assert [m["step"] for m in metrics(out) if "eval_loss" in m] == [STEPS], metrics(out)


def groups_without_a_signal_are_refilled(tmp, model):
    """By further prompts, none of which is left out or comes again; a command that fails between changes no bit."""
    text = SAMPLER + f"""
if "-1.prompts" in e["MEGATRAIN_PROMPTS"] and not os.path.exists(sys.argv[3]):
    sys.exit(open(sys.argv[3], "w").close() or 9)
"""
    open(f"{tmp}/there", "w").close()
    outs, said = [], ""
    for name, mark in (("refilled", "there"), ("failed", "once")):
        command = f"{sys.executable} {script(tmp, 'flaky.py', text.replace('sys.exit(int(sys.argv[2]))', ''))} 0 0 {tmp}/{mark}"
        ini, out = ini_of(tmp, name, model, command, policy__refill=2, policy__reward=f"{sys.executable} {script(tmp, 'judge.py', JUDGE)} 0")
        if mark == "once":
            assert "code 9" in megatrain("run", ini, expect=9).stderr and not os.path.exists(f"{out}/round-0.jsonl")
        said += megatrain("run", ini, "--resume").stderr
        outs.append(out)
    read = lambda path: [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    zero, most, at = [m["frac_reward_zero_std"] for m in metrics(outs[0]) if "loss" in m], 0, 0
    for k in range(STEPS):
        tries = [read(f"{outs[0]}/round-{k}{end}.prompts.jsonl") for end in ("", "-1", "-2")]
        asked, rows = [p["group"] for t in tries for p in t], read(f"{outs[0]}/round-{k}.jsonl")
        assert asked == list(range(at, at + len(asked))) and rows == read(f"{outs[1]}/round-{k}.jsonl")
        at += len(asked)
        rewards = {}
        for row in rows:
            rewards.setdefault(row["group"], []).append(row["reward"])
        alike = [len(set(r)) == 1 for r in rewards.values()]
        assert [len(r) for r in rewards.values()] == [3] * 4 and set(rewards) <= set(asked) and alike == sorted(alike)
        assert (sum(alike) == 0 or tries[2]) and abs(zero[k] - sum(alike) / 4) < 1e-6, (k, rewards)
        assert len(tries[1]) + len(tries[2]) >= 2 * len(tries[2]) and f"round {k}: rollouts of {4 - sum(alike)} prompts differ" in said
        most = max(most, len(asked))
    assert most > 4 and not [f for f in os.listdir(outs[0]) if ".part." in f]
    assert planes(f"{outs[0]}/checkpoint-{STEPS}") == planes(f"{outs[1]}/checkpoint-{STEPS}")


def a_round_whose_steps_are_skipped_is_passed_over(tmp, model):
    """As any step is: train.max_skips of them in a row end the run."""
    judge = script(tmp, "large.py", """
import json, sys
for line in sys.stdin:
    o = json.loads(line)
    print(len(o["completion"]) * (1e30 if o["group"] // 4 == 1 else 1))
""")
    ini, out = ini_of(tmp, "skipped", model, sampler(tmp), policy__reward=f"{sys.executable} {judge}", policy__scale="none")
    megatrain("-q", "run", ini)
    assert [m["skipped"] for m in metrics(out) if "loss" in m] == [False, True, False], metrics(out)


def failures_are_said(tmp, model):
    ini, out = ini_of(tmp, "fails", model, sampler(tmp, 0, 9))
    p = megatrain("run", ini, expect=9)
    assert "command ended with code 9" in p.stderr and not os.path.exists(f"{out}/round-0.jsonl"), p.stderr
    ini, _ = ini_of(tmp, "fails", model, sampler(tmp))
    p = megatrain("run", ini, expect=2)
    assert "has rounds already" in p.stderr, p.stderr
    megatrain("run", ini, "--resume")
    slow = f"{sys.executable} {script(tmp, 'judge.py', JUDGE)} 30"
    for what, code, rollouts, over in (
            ("took longer than policy.reward_seconds = 0.2", None, sampler(tmp), {"policy__reward": slow, "policy__reward_seconds": 0.2}),
            ("needs policy.old = file", 2, sampler(tmp), {"policy__steps_per_round": 2}), ("set policy.max_tokens", 2, sampler(tmp), {"policy__max_tokens": 0}),
            ("cannot start", 127, "/nowhere/sampler", {}), ("rounds need policy.loss", 2, sampler(tmp), {"policy__loss": "off"}),
            ("gave 0 rewards for 12 rollouts", None, sampler(tmp), {"policy__reward": "true"}),
            ("set it to full", 2, sampler(tmp), {"checkpoint__save": "weights"}),
            ("adapter.merge_every to 0", 2, sampler(tmp), {"adapter__kind": "lora", "adapter__merge_every": 2, "model__init": "weights"}), ("wrote no rollouts", None, "true", {})):
        ini, _ = ini_of(tmp, f"fails-{abs(hash(what))}", model, rollouts, **over)
        p = megatrain("run", ini, expect=code)
        assert p.returncode and what in p.stderr, (what, p.returncode, p.stderr)


def what_cannot_end_well_is_not_begun(tmp, model):
    """Training without room, a prompt far down without what rewards or samples need, a command that is not there: before
    anything is sampled."""
    write_prompts(f"{tmp}/short.jsonl", 40)
    with open(f"{tmp}/short.jsonl", "a") as f:
        f.write(json.dumps({"prompt_ids": [65]}) + "\n")
    with open(f"{tmp}/no-text.jsonl", "w") as f:
        f.writelines(json.dumps({"prompt": "say", "answer": "1"} if i < 40 else {"answer": "1"}) + "\n" for i in range(41))
    cases = (("memory.host_budget", 4, sampler(tmp), {"memory__host_budget": "32MiB"}),
             ("short.jsonl:41: policy.reward = number needs", 3, sampler(tmp), {"policy__prompts": f"{tmp}/short.jsonl"}),
             ("short.jsonl:41: policy.reward = number needs", 3, sampler(tmp),
              {"eval__generate": f"{tmp}/short.jsonl", "eval__generate_tokens": 4, "data__tokenizer": "byte"}),
             ("can be started", 2, sampler(tmp), {"policy__reward": "nowhere/judge 1"}), ("can be started", 2, sampler(tmp), {"policy__reward": "no-judge 1"}),
             ("no \"ref_logprobs\"", 2, "generate", {"policy__loss": "opd"}), ("has no room", 2, sampler(tmp), {"data__seq_len": 6}),
             ("no-text.jsonl:41", 3, "generate", {"policy__prompts": f"{tmp}/no-text.jsonl", "data__tokenizer": "byte"}))
    for i, (what, code, rollouts, over) in enumerate(cases):
        ini, out = ini_of(tmp, f"never-{i}", model, rollouts, **over)
        p = megatrain("run", ini, expect=code)
        assert what in p.stderr and not [f for f in (os.listdir(out) if os.path.exists(out) else []) if f.startswith("round")], (what, p.stderr)
    ini, out = ini_of(tmp, "never-0", model, sampler(tmp), memory__host_budget="32MiB")
    shutil.rmtree(out)
    assert "memory.host_budget" in megatrain("run", "--dry-run", ini, expect=4).stderr and not os.path.exists(out)
    megatrain("run", "--dry-run", ini, "--set", "memory.host_budget=auto")
    megatrain("check", ini, "--set", "memory.host_budget=auto")
    assert not os.path.exists(out), os.listdir(out)


def own_generation_is_a_command(tmp, model):
    """Adapters on a model with weights: whose rollouts have the log-probabilities that training computes."""
    ini, out = ini_of(tmp, "seed", model, sampler(tmp), train__steps=1)
    megatrain("-q", "run", ini)
    start, got = f"{out}/checkpoint-1", {}
    for old in ("batch", "file"):
        ini, out = ini_of(tmp, f"own-{old}", start, "generate", model__init="weights", adapter__kind="lora", policy__reward="regex", policy__old=old,
                          train__learning_rate="1e-2", data__tokenizer="byte", train__steps=2, policy__max_tokens=8, policy__prompts=f"{tmp}/text.jsonl")
        megatrain("run", ini)
        got[old] = [m for m in metrics(out) if "loss" in m]
    for a, b in zip(got["batch"], got["file"]):
        assert b["clip_ratio/region_mean"] == 0 and abs(a["loss"] - b["loss"]) < 1e-5, (a, b)


def adapters_are_sampled_on_what_others_were_merged_into(tmp, model):
    """The sampler's log-probabilities are those that training computes, but right behind a merge, which rounds weights."""
    ini, out = ini_of(tmp, "merged-seed", model, sampler(tmp), train__steps=1)
    megatrain("-q", "run", ini)
    ini, out = ini_of(tmp, "merged", f"{out}/checkpoint-1", "generate", model__init="weights", adapter__kind="lora", adapter__merge_every=2,
                      adapter__merge_warmup=0, policy__mismatch="token", policy__mismatch_max=1, train__learning_rate="1e-2",
                      policy__reward="regex", policy__prompts=f"{tmp}/text.jsonl", data__tokenizer="byte", train__steps=6)
    megatrain("run", ini)
    ratios = {m["step"]: m["sampling/importance_sampling_ratio/mean"] for m in metrics(out) if "loss" in m}
    assert all(ratios[step] == 1 for step in (1, 2, 4, 6)) and all(0.9 < ratios[step] < 1 for step in (3, 5)), ratios


class Stub(http.server.BaseHTTPRequestHandler):
    """What the scripts need of vLLM's API and of llama.cpp's server."""
    seen = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        ids = [97 + (body.get("seed", 0) + k) % 26 for k in range(4)]
        text, lp = bytes(ids).decode(), [-1.5] * 4
        of = {"/v1/load_lora_adapter": "Success", "/apply-template": {"prompt": "<user>" + str(body.get("messages"))},
              "/tokenize": {"tokens": list(str(body.get("content") or body.get("messages")).encode())[:40]},
              "/v1/completions": {"choices": [{"text": text, "token_ids": ids, "logprobs": {"token_logprobs": lp}, "finish_reason": "length" if i else "stop"}
                                              for i in range(body.get("n", 0))]},
              "/completion": {"content": text, "tokens": ids, "completion_probabilities": [{"logprob": x} for x in lp], "stop_type": "eos"}}[self.path]
        self.send_response(200)
        self.end_headers()
        self.wfile.write((of if isinstance(of, str) else json.dumps(of)).encode())

    def do_GET(self):  # /health
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def servers_sample_by_the_scripts(tmp, model):
    with open(f"{tmp}/chat.jsonl", "w") as f:
        f.writelines(json.dumps({"messages": [{"role": "user", "content": f"say {i}"}], "answer": "[a-m]"}) + "\n" for i in range(8))
    ini, out = ini_of(tmp, "served-seed", model, sampler(tmp), train__steps=1)
    megatrain("-q", "run", ini)
    start = f"{out}/checkpoint-1"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for api in ("vllm", "llama.cpp"):
        Stub.seen.clear()
        command = f"{sys.executable} {ROOT}/scripts/policy_rollouts.py {api} http://127.0.0.1:{server.server_port}"
        ini, out = ini_of(tmp, f"served-{api}", start, command, model__init="weights", adapter__kind="lora", policy__reward="regex",
                          policy__prompts=f"{tmp}/chat.jsonl", train__steps=2)
        megatrain("run", ini)
        assert len([m for m in metrics(out) if "loss" in m]) == 2
        paths = [path for path, _ in Stub.seen]
        loaded = [body for path, body in Stub.seen if path == "/v1/load_lora_adapter"]
        if api == "vllm":
            assert len(loaded) == 1 and loaded[0]["lora_name"] == "round-1" and loaded[0]["lora_path"].endswith("checkpoint-1"), loaded
            assert paths.count("/v1/completions") == 8 and paths.count("/tokenize") == 8
        else:
            assert paths.count("/completion") == 24 and paths.count("/apply-template") == 8
        with open(f"{out}/round-0.jsonl") as f:
            rows = [json.loads(line) for line in f]
        assert len(rows) == 12 and {r["reward"] for r in rows} == {0, 1} or api == "vllm", rows
        # servers' log-probabilities are of temperature 1, and so none at another
        for k, (more, over, code) in enumerate((("", {}, 0), ("", {"policy__mismatch": "token"}, 3),
                                                (" --processed", {"policy__mismatch": "token"}, 0 if api == "vllm" else 3))):
            ini, _ = ini_of(tmp, f"warm-{api}-{k}", start, command + more, model__init="weights", adapter__kind="lora", policy__reward="regex",
                            policy__prompts=f"{tmp}/chat.jsonl", policy__temperature=0.7, train__steps=1, **over)
            said = megatrain("run", ini, expect=code).stderr
            assert not code or "of policy.temperature" in said, said
    server.shutdown()


def main(tmp):
    model = write_model(f"{tmp}/model", config("qwen3"))
    write_prompts(f"{tmp}/prompts.jsonl")
    with open(f"{tmp}/text.jsonl", "w") as f:
        f.writelines(json.dumps({"prompt": f"say {i}", "answer": "[a-z]"}) + "\n" for i in range(8))
    tests = (rounds_train_on_what_they_sample, kills_in_each_phase_change_no_bit, a_save_that_was_killed_moves_no_round,
             an_evaluation_that_was_cut_short_is_made, groups_without_a_signal_are_refilled, a_round_whose_steps_are_skipped_is_passed_over,
             failures_are_said, what_cannot_end_well_is_not_begun, own_generation_is_a_command,
             adapters_are_sampled_on_what_others_were_merged_into, servers_sample_by_the_scripts)
    first = (rounds_train_on_what_they_sample, groups_without_a_signal_are_refilled, failures_are_said,
             what_cannot_end_well_is_not_begun, own_generation_is_a_command)
    for test in chosen(tests, first=first):
        test(tmp, model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
