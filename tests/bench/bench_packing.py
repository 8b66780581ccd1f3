# SPDX-License-Identifier: Apache-2.0
"""Packing of millions of samples: how full rows are, seconds and memory, by distributions of lengths that data sets have.

The shards are made here, their tokens a hole in the file: packing reads lengths alone. The goal is rows 98% full.
Runs in .venv-data.
"""
import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import data_env

data_env.enter("numpy")
import numpy as np

ROOT = data_env.ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from megatrain_data import shard
from tiny import BINARY, base, config, write_ini, write_model

SEQ_LEN, VOCAB = 4096, 272
#: median and sigma of log-normal lengths, cut at a row
CASES = {"short chats": (250, 0.9), "instructions": (450, 1.1), "long answers": (1500, 0.8)}


def write_shard(path, source_hash, lengths):
    """In the place of the shard of a file of one sample: same name, same hash."""
    w = shard.ShardWriter(path, VOCAB, source_hash)
    n = int(lengths.sum())
    w.n_tokens, w.n_samples, w.n_trained, w.max_len = n, len(lengths), n - len(lengths), int(lengths.max())
    tokens = w.files[""]
    tokens.seek(4 * n, os.SEEK_CUR)
    w.files[".mask"].truncate(n // 8)
    w.bits = np.zeros(n % 8, dtype=bool)
    w.files[".offsets"].write((np.cumsum(lengths) - lengths).astype("<u8").tobytes())
    w.files[".places"].write(np.arange(1, len(lengths) + 1).astype("<u8").tobytes())
    w.commit("input_ids", shard.LINES)


def prepare(ini):
    """Prints the rows, the seconds and the peak of memory."""
    t0 = time.monotonic()
    pid = os.fork()
    if not pid:
        said = subprocess.run([BINARY, "-q", "data", "prepare", ini], stdout=subprocess.PIPE, text=True, check=True).stdout
        print(said.splitlines()[-1], end="")
        print(f"; {time.monotonic() - t0:.2f} s, {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--samples", type=int, default=2000000)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        model = write_model(os.path.join(tmp, "model"), config("llama", vocab_size=VOCAB, max_position_embeddings=8192))
        data, cache = os.path.join(tmp, "data.jsonl"), os.path.join(tmp, "cache")
        with open(data, "w") as f:
            f.write('{"input_ids": [1, 2, 3]}\n')
        ini = write_ini(os.path.join(tmp, "run.ini"), base(model, data, os.path.join(tmp, "out"), data__eval="", data__seq_len=SEQ_LEN,
            data__cache_dir=cache, train__batch_size=8))
        subprocess.run([BINARY, "-q", "data", "prepare", ini], stdout=subprocess.DEVNULL, check=True)
        path = os.path.join(cache, next(f for f in os.listdir(cache) if f.endswith(".tokens")))
        source_hash = int(re.sub(r"\.tokens$", "", os.path.basename(path)), 16)
        for name, (median, sigma) in CASES.items():
            lengths = np.random.default_rng(1).lognormal(np.log(median), sigma, args.samples)
            write_shard(path, source_hash, np.clip(lengths.astype(np.int64), 2, SEQ_LEN))
            print(f"{name:13s} {args.samples} samples, median {median}, sigma {sigma}: ", end="", flush=True)
            prepare(ini)


main()
