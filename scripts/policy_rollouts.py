#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Samples a round's rollouts from a server, for policy.rollouts (standard library only):

    policy.rollouts = python3 scripts/policy_rollouts.py vllm http://localhost:8000
    policy.rollouts = python3 scripts/policy_rollouts.py llama.cpp http://localhost:8080 --gguf model.gguf

vllm: the server runs with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora; each round's adapter is loaded under a
new name, round-R. llama.cpp: its server cannot load a new adapter while it runs, so it is started for each round, with the
model of --gguf and the adapter that convert_lora_to_gguf.py makes of $MEGATRAIN_ADAPTER (both of --llama-cpp, or
llama-server on the PATH); without --gguf a server runs already, and --before may name a command that starts it again.

Log-probabilities are those of temperature 1, whatever policy.temperature is; with another, policy.old = batch and policy.mismatch =
none do without them. vLLM's are of policy.temperature if its server runs with --logprobs-mode processed_logprobs: then say
--processed here.

megatrain says in the environment what to do: MEGATRAIN_ROUND, MEGATRAIN_MODEL, MEGATRAIN_ADAPTER (empty before the first
update), MEGATRAIN_PROMPTS and MEGATRAIN_ROLLOUTS (files of JSON lines), MEGATRAIN_SAMPLES, MEGATRAIN_MAX_TOKENS,
MEGATRAIN_TEMPERATURE, MEGATRAIN_SEED."""
import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def post(url, path, body, timeout):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as e:
        sys.exit(f"{url}{path}: {e}: {e.read().decode(errors='replace')[:500]}")
    except OSError as e:
        sys.exit(f"{url}{path}: {e}")
    try:
        return json.loads(text)
    except ValueError:
        return {}  # vLLM says in plain words that an adapter is loaded


class Vllm:
    """The OpenAI API with vLLM's additions: /tokenize, return_token_ids, /v1/load_lora_adapter."""

    def __init__(self, args):
        self.args, self.name = args, os.environ["MEGATRAIN_MODEL"]
        if os.environ["MEGATRAIN_ADAPTER"]:
            self.name = f"round-{os.environ['MEGATRAIN_ROUND']}"
            post(args.url, "/v1/load_lora_adapter", {"lora_name": self.name, "lora_path": os.path.abspath(os.environ["MEGATRAIN_ADAPTER"])}, args.timeout)

    def tokens(self, record):
        given = {k: record[k] for k in ("messages", "prompt") if k in record}
        return post(self.args.url, "/tokenize", {"model": self.name, **given}, self.args.timeout)["tokens"]

    def sample(self, ids, n, most, temperature, seed):
        got = post(self.args.url, "/v1/completions", {
            "model": self.name, "prompt": ids, "n": n, "max_tokens": most, "temperature": temperature, "seed": seed, "logprobs": 0,
            "return_token_ids": True}, self.args.timeout)
        for c in got["choices"]:
            yield c["text"], c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"] == "length"


class LlamaCpp:
    """llama.cpp's server: /apply-template, /tokenize, /completion."""

    def __init__(self, args):
        self.args = args

    def tokens(self, record):
        post_to = lambda path, body: post(self.args.url, path, body, self.args.timeout)
        text = post_to("/apply-template", {"messages": record["messages"]})["prompt"] if "messages" in record else record["prompt"]
        return post_to("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]

    def sample(self, ids, n, most, temperature, seed):
        for i in range(n):
            c = post(self.args.url, "/completion", {
                "prompt": ids, "n_predict": most, "temperature": temperature, "seed": seed + i, "n_probs": 1, "return_tokens": True,
                "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": True}, self.args.timeout)
            yield c["content"], c["tokens"], [p["logprob"] for p in c["completion_probabilities"]], c["stop_type"] == "limit"


@contextlib.contextmanager
def server_of(args):
    """llama.cpp's, while a round is sampled; nothing where a server runs already."""
    adapter, of = os.environ["MEGATRAIN_ADAPTER"], []
    if not args.gguf:
        yield
        return
    if adapter:
        made = os.environ["MEGATRAIN_ROLLOUTS"] + ".gguf"
        subprocess.run([sys.executable, os.path.join(args.llama_cpp, "convert_lora_to_gguf.py"), adapter, "--outfile", made], check=True)
        of = ["--lora", made]
    built = os.path.join(args.llama_cpp, "build", "bin", "llama-server")
    port = urllib.parse.urlsplit(args.url).port or 80
    with subprocess.Popen([shutil.which("llama-server") or built, "-m", args.gguf, "--port", str(port), "--jinja", *of]) as server:
        try:
            ends = time.monotonic() + args.timeout
            while True:
                try:
                    urllib.request.urlopen(args.url + "/health", timeout=10).close()
                    break
                except OSError:  # not there, or loading: 503
                    if server.poll() is not None or time.monotonic() > ends:
                        sys.exit("llama-server has not started")
                    time.sleep(0.2)
            yield
        finally:
            server.terminate()
    if of:
        os.unlink(of[1])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("api", choices=("vllm", "llama.cpp"))
    p.add_argument("url")
    p.add_argument("--before", help="a command that is run before sampling")
    p.add_argument("--processed", action="store_true", help="vLLM's server runs with --logprobs-mode processed_logprobs")
    p.add_argument("--gguf", help="the model with which llama.cpp's server is started")
    p.add_argument("--llama-cpp", default="llama.cpp", help="its folder")
    p.add_argument("--at-once", type=int, default=16, help="prompts that are asked for at once")
    p.add_argument("--timeout", type=float, default=3600)
    args = p.parse_args()
    args.url = args.url.rstrip("/")
    if args.before:
        subprocess.run(args.before, shell=True, check=True)
    number = lambda name: int(os.environ["MEGATRAIN_" + name])
    temperature = float(os.environ["MEGATRAIN_TEMPERATURE"])
    of = {"logprobs_temperature": 1} if temperature != 1 and not (args.processed and args.api == "vllm") else {}

    def of_prompt(numbered):
        i, record = numbered
        ids = record.get("prompt_ids") or server.tokens(record)
        seed = (number("SEED") * 1000003 + i * number("SAMPLES")) % (1 << 31)
        rows = []
        for text, tokens, logprobs, cut in server.sample(ids, number("SAMPLES"), number("MAX_TOKENS"), temperature, seed):
            if len(tokens) != len(logprobs):
                sys.exit(f"the server gave {len(tokens)} tokens, but {len(logprobs)} log-probabilities")
            rows.append({**record, "completion": text, "prompt_ids": ids, "completion_ids": tokens, "logprobs": [min(x, 0.0) for x in logprobs],
                         "temperature": temperature, "truncated": cut, **of})
        return rows

    with open(os.environ["MEGATRAIN_PROMPTS"]) as f:
        records = [json.loads(line) for line in f]
    with server_of(args), ThreadPoolExecutor(args.at_once) as pool, open(os.environ["MEGATRAIN_ROLLOUTS"], "w") as out:
        server = (Vllm if args.api == "vllm" else LlamaCpp)(args)
        for rows in pool.map(of_prompt, enumerate(records)):
            out.writelines(json.dumps(row) + "\n" for row in rows)


main()
