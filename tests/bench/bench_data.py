# SPDX-License-Identifier: Apache-2.0
"""Preparation of data against `tokenizers`' encode_batch alone, on the same text in as many processes.

Prints, for text and for messages with template and masks, megabytes of text a second of both and their ratio: the
median of 5 runs in turn. The goal is 0.95 for text and 0.80 for messages. With --memory MB, the peak memory of a
preparation of that much JSONL, and of a tenth of it. Runs in .venv-data; MEGATRAIN need not be set.
"""
import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import data_env

data_env.enter("tokenizers")
ROOT = data_env.ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import families
from megatrain_data import encode, formats


class Words:
    """Words by Zipf's law, as text has them."""

    def __init__(self, seed=7, n=30000):
        r = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        self.words = ["".join(r.choices(letters, [1 / (k + 2) for k in range(26)], k=r.randrange(1, 11))) for _ in range(n)]
        self.weights = list(__import__("itertools").accumulate(1 / (k + 1) for k in range(n)))
        self.r = r

    def text(self, n):
        got = self.r.choices(self.words, cum_weights=self.weights, k=n)
        return " ".join(w if k % 13 else w.capitalize() + "," for k, w in enumerate(got)) + "."


def baseline_worker(pipe, tokenizer, batches):
    pipe.recv()
    for b in batches:
        tokenizer.encode_batch(b, add_special_tokens=False)
    pipe.send(True)


def encode_batch_seconds(tokenizer, texts, n):
    """Wall time of n processes that encode all texts, a hundred at a time, in turn."""
    batches = [texts[i:i + 100] for i in range(0, len(texts), 100)]
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for k in range(n):
        ours, theirs = context.Pipe()
        p = context.Process(target=baseline_worker, args=(theirs, tokenizer, batches[k::n]), daemon=True)
        p.start()
        pipes.append(ours)
        processes.append(p)
    t0 = time.monotonic()
    for p in pipes:
        p.send(True)
    for p in pipes:
        p.recv()
    seconds = time.monotonic() - t0
    for p in processes:
        p.join()
    return seconds


def prepare(model, data, n, out):
    """(seconds from the first chunk to the shard, MiB of the largest process)."""
    job = {"mode": "prepare", "model_dir": model, "tokenizer": "model", "template": "model", "train_on": "assistant", "vocab": 1 << 20,
           "processes": n, "sources": [{"path": data, "format": "auto", "out": out, "hash": "1"}]}
    p = subprocess.Popen([sys.executable, os.path.join(ROOT, "scripts", "prepare_data.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said, _ = p.communicate(json.dumps(job))
    events = [json.loads(l) for l in said.splitlines()]
    assert events[-1]["event"] == "done", events[-1]
    return next(e for e in events if e["event"] == "source")["seconds"]


def compare(name, goal, model, data, texts, n, tmp):
    tok = encode.ModelTokenizer(model).t
    rows = []
    size = sum(len(t.encode()) for t in texts) / 1e6
    for _ in range(5):
        alone = encode_batch_seconds(tok, texts, n)
        rows.append((alone, prepare(model, data, n, os.path.join(tmp, "out.tokens"))))
    ratio = statistics.median(a / b for a, b in rows)
    print(f"{name:10s} {n} processes, {size:.0f} MB of text: encode_batch {size / statistics.median(a for a, _ in rows):.2f} MB/s, preparation "
          f"{size / statistics.median(b for _, b in rows):.2f} MB/s, ratio {ratio:.3f} (goal {goal})  "
          f"{' '.join(f'{a / b:.3f}' for a, b in rows)}", flush=True)
    return ratio


def write_text(path, words, megabytes):
    texts, size = [], 0
    with open(path, "w") as f:
        while size < megabytes * 1e6:
            texts.append(words.text(words.r.randrange(50, 900)))
            size += len(texts[-1])
            f.write(json.dumps({"text": texts[-1]}) + "\n")
    return texts


def write_chats(path, words, megabytes, model):
    texts, size = [], 0
    encoder = encode.Encoder({"tokenizer": "model", "model_dir": model, "vocab": 1 << 20})
    with open(path, "w") as f:
        while size < megabytes * 1e6:
            turns = []
            for _ in range(words.r.randrange(1, 5)):
                turns += [{"role": "user", "content": words.text(words.r.randrange(5, 120))},
                          {"role": "assistant", "content": words.text(words.r.randrange(20, 350))}]
            line = json.dumps({"messages": turns})
            size += len(line)
            f.write(line + "\n")
            texts.append(encoder.chat_text(formats.convert({"messages": turns}, "messages", {}))[0])
    return texts


def memory(tmp, model, words, megabytes):
    """Peak of the helper's largest process, by /usr/bin/time's way: children of a child of ours."""
    for size in (megabytes // 10, megabytes):
        data = os.path.join(tmp, "big.jsonl")
        block = [json.dumps({"text": words.text(500)}) + "\n" for _ in range(300)]
        with open(data, "w") as f:
            written = 0
            while written < size * 1e6:
                line = words.r.choice(block)
                written += len(line)
                f.write(line)
        t0, pid = time.monotonic(), os.fork()
        if not pid:
            prepare(model, data, 2, os.path.join(tmp, "out.tokens"))
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"memory     {size} MB of JSONL: {peak:.0f} MiB in the largest process, {time.monotonic() - t0:.0f} s", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--megabytes", type=int, default=12)
    p.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--memory", type=int, default=0)
    p.add_argument("--style", default="qwen3", choices=families.FAMILIES, help="of tokenizer and template")
    args = p.parse_args()
    words = Words()
    with tempfile.TemporaryDirectory() as tmp:
        model = os.path.join(tmp, "model")
        families.corpus = lambda seed=1, n=0: [words.text(300) for _ in range(3000)]
        families.write_tokenizer(model, args.style, size=16000)
        if args.memory:
            memory(tmp, model, words, args.memory)
            return
        data = os.path.join(tmp, "text.jsonl")
        compare("text", 0.95, model, data, write_text(data, words, args.megabytes), args.processes, tmp)
        data = os.path.join(tmp, "chat.jsonl")
        compare("messages", 0.80, model, data, write_chats(data, words, args.megabytes, model), args.processes, tmp)


main()
