# SPDX-License-Identifier: Apache-2.0
"""The recipes of megatrain-policy(7), line by line as they are printed. The first learns: on one of three seeds, another each
day, prompts that it was not trained on are answered rightly, of which the model that it began with answers few. The others
sample from servers, for which programs stand in that speak their API."""
import json
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import time

from tiny import BINARY, FULL, chosen, config, metrics, with_weights, write_data, write_model

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
#: processor seconds of two cores in 15 minutes
MOST_SECONDS = 2 * 15 * 60
SEEDS = (1 + int(time.time()) // 86400 % 3,)

#: a server for the port that its command line names
SERVER = f'''#!{sys.executable}
import http.server, sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
from test_policy_rounds import Stub
args = sys.argv[1:]
port = int(args[args.index("--port") + 1]) if "--port" in args else 8000
open(f"served-{{port}}", "a").write(" ".join(args) + "\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Stub).serve_forever()
'''
#: what a converter is asked for
CONVERTER = '''import sys
open("converted", "a").write(" ".join(sys.argv[1:]) + "\\n")
open(sys.argv[sys.argv.index("--outfile") + 1], "w").close()
'''


def recipes():
    """Lines of each block that has a command, of the last three."""
    with open(os.path.join(ROOT, "cli", "help", "policy.txt"), encoding="utf-8") as f:
        blocks = re.findall(r"(?:^  .*\n)+", f.read(), re.M)
    return [[line[2:] for line in block.splitlines()] for block in blocks if "megatrain run" in block][-3:]


def program(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, stat.S_IRWXU)


def sources(tmp):
    """A folder that looks as that of the sources does."""
    os.makedirs(tmp)
    for name in ("scripts", "configs"):
        os.symlink(os.path.join(os.path.abspath(ROOT), name), f"{tmp}/{name}")
    program(f"{tmp}/bin/megatrain", f'#!/bin/sh\nexec {BINARY} "$@" $MORE\n')
    return {**os.environ, "PATH": f"{tmp}/bin:{os.environ['PATH']}"}


def shell(lines, tmp, env):
    script = "set -e\n" + "\n".join(lines) + "\n"
    p = subprocess.run(["bash", "-c", script], cwd=tmp, env=env, capture_output=True, text=True)
    assert not p.returncode, (p.stdout[-2000:], p.stderr[-4000:])
    return p.stdout


def share_right(text):
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(rows) == 12
    return sum(r["completion"] == r["answer"] for r in rows) / len(rows)


def used():
    r = resource.getrusage(resource.RUSAGE_CHILDREN)
    return r.ru_utime + r.ru_stime


def it_learns(tmp):
    own = recipes()[0]
    env = sources(f"{tmp}/learns")
    ask, = [line for line in own if line.startswith("megatrain generate")]
    start = own.index("megatrain run configs/demo_policy.ini")
    if not FULL:  # a fraction of the demo's model
        shape = write_model(f"{tmp}/shape", config("qwen3", hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32,
                                                   tie_word_embeddings=True))
        small = ["megatrain run configs/demo_policy_start.ini --set model.path=" + shape]
    else:
        small = own[start - 1:start]
    shell(own[:start - 1] + small, f"{tmp}/learns", env)
    before = share_right(shell(own[:1] + [ask.replace("policy/policy/latest", "policy/policy-start/latest")], f"{tmp}/learns", env))
    assert before < 0.2, before
    with open(f"{tmp}/learns/out/policy/held-out.jsonl") as f:
        answers = [json.loads(line)["answer"] for line in f]
    assert max(answers.count(a) for a in answers) / len(answers) < 0.25
    for seed in SEEDS:
        began = used()
        env["MORE"] = f"--set train.seed={seed} --set checkpoint.dir={tmp}/learns/seed-{seed}"
        shell(own[:1] + own[start:start + 1], f"{tmp}/learns", env)
        env["MORE"] = ""
        after = share_right(shell(own[:1] + [ask.replace("out/policy/policy/latest", f"seed-{seed}/latest")], f"{tmp}/learns", env))
        assert after > 0.8 and used() - began < MOST_SECONDS, (seed, before, after, used() - began)
        print(f"seed {seed}: {before:.0%} to {after:.0%} of held-out prompts in {used() - began:.0f} processor seconds")


def servers_sample(tmp):
    home = f"{tmp}/served"
    env = sources(home)
    os.unlink(f"{home}/configs")
    program(f"{home}/configs/grpo_qwen3.ini", open(os.path.join(ROOT, "configs", "grpo_qwen3.ini"), encoding="utf-8").read())
    shape = write_model(f"{tmp}/shape-served", config("qwen3", num_hidden_layers=2, max_position_embeddings=8192))
    model = with_weights(tmp, shape, write_data(f"{tmp}/ids.jsonl"), "Qwen3-8B")
    snapshot = f"{tmp}/hf/hub/models--Qwen--Qwen3-8B/snapshots/0"
    os.makedirs(os.path.dirname(snapshot))
    os.symlink(model, snapshot)
    program(f"{tmp}/hf/hub/models--Qwen--Qwen3-8B/refs/main", "0")
    os.makedirs(f"{home}/data")
    with open(f"{home}/data/prompts.jsonl", "w") as f:
        f.writelines(json.dumps({"messages": [{"role": "user", "content": f"say {i}"}], "answer": f"{i}"}) + "\n" for i in range(8))
    for name in ("vllm", "llama-server"):
        program(f"{home}/bin/{name}", SERVER)
    program(f"{home}/bin/hf", "#!/bin/sh\n")
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        program(f"{home}/llama.cpp/{name}", CONVERTER)
    env.update(HF_HOME=f"{tmp}/hf")
    for recipe, out in zip(recipes()[1:], ("vllm", "llama.cpp")):
        env["MORE"] = f"--set train.steps=2 --set checkpoint.dir={home}/{out}"
        wait = [f"while ! python3 -c 'import socket; socket.create_connection((\"localhost\", 8000))' 2>&-; do sleep 0.1; done"]
        lines = [x for line in recipe for x in [line] + (wait if line.endswith("&") else [])]
        shell(["trap 'kill $(jobs -p) || true' EXIT"] + lines, home, env)
        assert len([m for m in metrics(f"{home}/{out}") if "loss" in m]) == 2
        with open(f"{home}/{out}/round-1.jsonl") as f:
            assert len(f.readlines()) == 64
    with open(f"{home}/served-8080") as f:
        starts = f.read().splitlines()
    assert len(starts) == 2 and "--lora" not in starts[0] and "--lora" in starts[1], starts
    with open(f"{home}/converted") as f:
        asked = f.read().splitlines()
    assert len(asked) == 2 and "checkpoint-1" in asked[1], asked


def main(tmp):
    assert len(recipes()) == 3
    for test in chosen((it_learns, servers_sample)):
        test(tmp)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
