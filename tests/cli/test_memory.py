# SPDX-License-Identifier: Apache-2.0
"""The memory table is kept: a model whose state is twenty times the device budget, with the kernel's record of the
process's largest resident set (code and libraries included; how much of them is there as a process begins varies by
some MiB, which a small model's table is allowed on top).

It may never exceed what the table promised, nor the device budget (the cpu device's arena is host memory) plus 14 B a
parameter (16 in f32), boundaries and 200 MB. The table may be 2% above it.
"""
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time

from tiny import BINARY, FULL, base, config, write_data, write_ini, write_model

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def resident(pid):
    """The largest resident set of the process so far, in bytes."""
    try:
        with open(f"/proc/{pid}/status") as f:
            return max([int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:")], default=0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def run(ini):
    peak, samples = 0, 0
    with open(ini + ".log", "w+") as log:
        # meson has malloc fill what it gives: that touches the rest of buffers that are larger than what is put in them
        p = subprocess.Popen([BINARY, "run", ini], stdout=subprocess.DEVNULL, stderr=log,
                             env={**os.environ, "MALLOC_PERTURB_": "0"})
        while p.poll() is None:
            peak = max(peak, resident(p.pid))
            samples += 1
            time.sleep(0.005)
        log.seek(0)
        said = log.read()
    assert p.returncode == 0, said
    assert samples > 20, "the run was too short to be sampled"
    return said, peak


def table(said):
    """(tier, use) -> bytes, as printed, with the sums as ("sum", tier)."""
    rows, tier = {}, ""
    for first, use, number, unit in re.findall(r"^  (.{14})  (.{28})  +([\d.]+) ([KMGT]?i?B)$", said, re.M):
        tier = first.strip() or tier
        rows[tier, use.strip()] = float(number) * UNITS[unit]
    assert ("sum", "device") in rows and ("sum", "host") in rows, said
    return rows


def mixture(tmp, hidden, width, seq_len):
    """Sixteen experts a layer, which are nearly all of it."""
    model = write_model(os.path.join(tmp, f"mixture-{hidden}"), config("qwen3_moe", num_hidden_layers=24, hidden_size=hidden,
        moe_intermediate_size=width, num_experts=16, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64,
        head_dim=32))
    return model, write_data(os.path.join(tmp, "data.jsonl"), n=80, longest=seq_len)


def make(tmp, hidden, ffn, seq_len):
    model = write_model(os.path.join(tmp, f"model-{hidden}"), config("qwen3", num_hidden_layers=48, hidden_size=hidden,
        intermediate_size=ffn, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32))
    return model, write_data(os.path.join(tmp, "data.jsonl"), n=80, longest=seq_len)


def measure(tmp, name, shape, dtype, budget, make=make, **over):
    """Trains; the table, what it promised in all and the peak."""
    hidden, ffn, seq_len = shape
    out = os.path.join(tmp, f"out-{name}-{dtype}")
    settings = dict(model__dtype=dtype, memory__device_budget=f"{budget}MiB", memory__activations="recompute",
                    data__seq_len=seq_len, train__steps=3, train__batch_size=2, train__micro_batch=1, checkpoint__save="weights")
    said, peak = run(write_ini(out + ".ini", base(*make(tmp, hidden, ffn, seq_len), out, **{**settings, **over})))
    rows = table(said)
    return rows, rows["sum", "device"] + rows["sum", "host"], peak


#: of small runs: CPUs differ by some 10 MiB in how much of the libraries they touch
SLACK = 18 << 20


def keeps_the_table(promised, peak, slack=0):
    rounding = 10 << 20 if promised > 1 << 30 else 0  # sums are printed to a hundredth of a GiB
    assert peak <= promised + rounding, f"the table promised {promised:.0f}, the run took {peak}"
    assert promised - peak <= slack + 0.02 * promised, f"the table promised {promised:.0f}, the run took only {peak}"


def check(tmp, dtype, shape, budget, least_state, slack=0):
    rows, promised, peak = measure(tmp, "host", shape, dtype, budget)
    planes = sum(v for (tier, use), v in rows.items() if tier == "host" and use.startswith(("weights", "first", "second")))
    n_params = planes / 12
    bound = (budget << 20) + (14 if dtype == "bf16" else 16) * n_params + rows.get(("host", "boundaries and activations"), 0) + 200e6
    print(f"{dtype}: state {planes / 2**20:.0f} MiB, device budget {budget} MiB, promised {promised / 2**20:.1f} MiB, "
          f"measured {peak / 2**20:.1f} MiB", flush=True)
    assert planes >= 20 * (budget << 20), "the state is not 20 times the budget"
    assert planes >= least_state
    assert peak <= bound, f"{peak} bytes are over the claim of {bound:.0f}"
    keeps_the_table(promised, peak, slack)


def check_lengths(tmp, shape, budget):
    """Rows of hundreds of lengths: a library that makes code for each keeps much of it."""
    _, promised, peak = measure(tmp, "lengths", shape, "bf16", budget, train__steps=100)
    print(f"lengths: promised {promised / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB", flush=True)
    keeps_the_table(promised, peak, SLACK)


def check_mixture(tmp, dtype, shape, budget, slack=0):
    """Experts whose state is twenty times the device budget, in groups of four."""
    rows, promised, peak = measure(tmp, "mixture", shape, dtype, budget, make=mixture, memory__expert_group=4)
    experts = 24 * 16 * 3 * shape[0] * shape[1]
    print(f"{dtype} experts: state {12 * experts / 2**20:.0f} MiB, device budget {budget} MiB, promised {promised / 2**20:.1f} MiB, "
          f"measured {peak / 2**20:.1f} MiB", flush=True)
    assert 12 * experts >= 20 * (budget << 20), "the experts' state is not 20 times the budget"
    assert ("device", "routing") in rows and rows["sum", "device"] <= budget << 20, rows
    keeps_the_table(promised, peak, slack)


def check_disk(tmp, dtype, shape, budget, host_budget, slack=0):
    """States on the disk, all of the training state saved after each step."""
    drive = os.path.join(tmp, "drive")
    os.makedirs(drive, exist_ok=True)
    rows, promised, peak = measure(tmp, "disk", shape, dtype, budget, memory__states="auto", memory__nvme_paths=drive,
                                   memory__host_budget=f"{host_budget}MiB", checkpoint__save="full", checkpoint__every=1,
                                   checkpoint__keep=1)
    on_disk = sum(v for (tier, use), v in rows.items() if tier == "nvme")
    print(f"{dtype} from disk: {on_disk / 2**20:.0f} MiB on it, host budget {host_budget} MiB, promised "
          f"{promised / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB", flush=True)
    assert on_disk > host_budget << 20 and promised <= host_budget << 20, rows
    keeps_the_table(promised, peak, slack)


LORA = dict(adapter__kind="lora", adapter__rank=8, train__steps=1, train__batch_size=1, model__dtype="bf16")


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def write_dense(tmp, layers, hidden, ffn):
    return write_model(os.path.join(tmp, f"dense-{layers}"), config("qwen3", num_hidden_layers=layers, hidden_size=hidden,
        intermediate_size=ffn, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64))


def matrices(layers, hidden, ffn):
    return layers * (3 * hidden * hidden + 3 * hidden * ffn)


def run_adapters(tmp, name, model, budget, seq_len, **over):
    """Trains adapters; rows of the table, their sum, the peak, and how many parameters are trained."""
    data = write_data(os.path.join(tmp, f"few-{seq_len}.jsonl"), n=40, longest=seq_len)
    out = os.path.join(tmp, f"out-{name}")
    settings = {**LORA, "memory__device_budget": f"{budget}MiB", "data__seq_len": seq_len, **over}
    said, peak = run(write_ini(out + ".ini", base(model, data, out, **settings)))
    rows = table(said)
    trained, unit = re.search(r"([\d.]+)([KMG]?) parameters trained", said).groups()
    return rows, rows["sum", "device"] + rows["sum", "host"], peak, float(trained) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[unit]


def check_packed(tmp, layers, hidden, ffn, budget, seq_len, slack=0):
    """A base in NF4, and adapters on it."""
    model, read = write_dense(tmp, layers, hidden, ffn), {}
    if layers > 100: # packing so much takes minutes
        write_zeros(model, layers, hidden, ffn, nf4=True)
        read = dict(model__init="weights", data__eval="") # an evaluation would take as long as the step
    rows, promised, peak, trained = run_adapters(tmp, f"nf4-{layers}", model, budget, seq_len, **(read or dict(model__base_dtype="nf4")))
    packed, n = rows["host", "frozen weights (packed)"], matrices(layers, hidden, ffn)
    own = sum(v for (tier, use), v in rows.items() if tier == "host" and use.startswith(("weights", "first", "second", "grad")))
    print(f"nf4: {packed / 1e9:.2f} GB, {packed / n:.4f} bytes a parameter; adapters {own / trained:.1f}; device budget {budget} MiB, "
          f"promised {promised / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB", flush=True)
    assert packed <= 0.53 * n and own <= 16 * trained * 1.01, rows
    assert rows["sum", "device"] <= budget << 20, rows
    keeps_the_table(promised, peak, slack)


def write_zeros(model, layers, hidden, ffn, nf4=False):
    """Its weights, as holes of a file; or packed as bitsandbytes does."""
    shapes = {"model.embed_tokens": [272, hidden], "model.norm": [hidden], "lm_head": [272, hidden]}
    for i in range(layers):
        of = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [64], "self_attn.k_norm": [64],
              "self_attn.q_proj": [hidden, hidden], "self_attn.o_proj": [hidden, hidden], "self_attn.k_proj": [hidden // 2, hidden],
              "self_attn.v_proj": [hidden // 2, hidden], "mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden],
              "mlp.down_proj": [hidden, ffn]}
        shapes.update({f"model.layers.{i}.{k}": v for k, v in of.items()})
    tensors, header, at = [], {}, 0
    for name, shape in shapes.items():
        n, w = shape[0] * (shape[1] if len(shape) > 1 else 1), name + ".weight"
        if not nf4 or "_proj" not in name:
            tensors.append((w, "BF16", shape, 2 * n, b""))
            continue
        note = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape, "nested_blocksize": 256,
                           "nested_dtype": "float32", "nested_offset": 0.0}).encode()
        tensors += [(w, "U8", [n // 2, 1], n // 2, b""), (w + ".absmax", "U8", [n // 64], n // 64, b""),
                    (w + ".nested_absmax", "F32", [-(-n // 16384)], -(-n // 16384) * 4, b""),
                    (w + ".nested_quant_map", "F32", [256], 1024, b""),
                    (w + ".quant_map", "F32", [16], 64, struct.pack("<16f", *NF4)),
                    (w + ".quant_state.bitsandbytes__nf4", "U8", [len(note)], len(note), note)]
    for name, dtype, shape, n, _ in sorted(tensors, key=lambda t: ("F32", "BF16", "U8").index(t[1])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(model, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
        for name, _, _, _, data in tensors:
            f.seek(8 + len(text) + header[name]["data_offsets"][0])
            f.write(data)


def check_files(tmp, sizes, hidden, ffn, budget, seq_len):
    """A base in files: what is in host memory does not depend on how much of it there is."""
    host, peaks = [], []
    for layers in sizes:
        model = write_dense(tmp, layers, hidden, ffn)
        write_zeros(model, layers, hidden, ffn)
        rows, promised, peak, trained = run_adapters(tmp, f"files-{layers}", model, budget, seq_len,
                                                     memory__base="files", model__init="weights", memory__slots=2)
        assert ("host", "frozen weights") not in rows, rows
        keeps_the_table(promised, peak, SLACK)
        host.append(rows["sum", "host"] - 16 * trained)
        peaks.append(peak - 16 * trained)
    more = 2 * (matrices(sizes[1], hidden, ffn) - matrices(sizes[0], hidden, ffn))
    print(f"files: {more / 2**20:.0f} MiB more of the base, {(host[1] - host[0]) / 2**20:.1f} MiB more promised, "
          f"{(peaks[1] - peaks[0]) / 2**20:.1f} measured", flush=True)
    assert host[1] - host[0] < 0.1 * more and peaks[1] - peaks[0] < 0.1 * more + (4 << 20)


def check_merges(tmp, layers, hidden, ffn, budget, seq_len):
    """What merging adapters takes is given back: each merge has matrices of 2M elements to write and to read again."""
    model = write_dense(tmp, layers, hidden, ffn)
    write_zeros(model, layers, hidden, ffn)
    _, promised, peak, _ = run_adapters(tmp, "merges", model, budget, seq_len, model__dtype="f32", model__init="weights", train__steps=3,
                                        adapter__merge_every=1, data__eval="")
    print(f"merges: promised {promised / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB", flush=True)
    keeps_the_table(promised, peak, SLACK)


def main(tmp):
    for dtype in sys.argv[1:]:
        if FULL:  # 4 GiB of memory, some minutes
            check(tmp, dtype, (576, 1728, 64), 100, 2 << 30)
            check_disk(tmp, dtype, (576, 1728, 64), 100, 640) # of which 2% is what CPUs differ by
            check_mixture(tmp, dtype, (512, 512, 64), 100)
        else:
            check(tmp, dtype, (192, 512, 64), 10, 0, SLACK)
            check_disk(tmp, dtype, (192, 512, 64), 10, 128, SLACK)
            check_mixture(tmp, dtype, (128, 128, 64), 10, SLACK)
    if "f32" in sys.argv:
        check_merges(tmp, 2, 512, 4096, 72, 16)
    if "bf16" in sys.argv:
        check_packed(tmp, 24, 512, 1536, 32, 64, SLACK)
        check_files(tmp, (3, 9), 1024, 2048, 96, 64)
    if "bf16" in sys.argv and FULL:
        check_packed(tmp, 150, 2048, 6144, 256, 16) # 4 GB
        check_lengths(tmp, (192, 512, 512), 60)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        main(tmp)
