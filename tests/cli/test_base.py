#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where frozen weights live (memory.base): the same bits from host memory, from drives and from the model's own files."""
import ctypes
import glob
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

from tiny import (BINARY, base, config, fixture, losses, megatrain, metrics, planes, read_safetensors, write_data,
                  write_ini, write_model)

LAYERS = 3
# a third of a layer's tensors are large enough to be read in place
SHAPE = dict(hidden_size=256, intermediate_size=2304, num_hidden_layers=LAYERS, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32)
MLP = LAYERS * 3 * 2304 * 256 * 2  # bytes
PIECES = {"MEGATRAIN_DISK_PIECE": "2048"}


def make_model(tmp):
    """Weights of bf16 in several files."""
    made, stored = os.path.join(tmp, "made"), os.path.join(tmp, "stored")
    data = write_data(os.path.join(tmp, "data.jsonl"))
    write_model(made, config("qwen3", **SHAPE))
    out = os.path.join(tmp, "first")
    megatrain("-q", "run", write_ini(out + ".ini", base(made, data, out, train__steps=1, model__dtype="bf16")))
    megatrain("export", f"{out}/checkpoint-1", stored, "--shard-size", "3MB")
    shutil.rmtree(f"{stored}/megatrain")  # its checksums: as other programs write models
    assert len(glob.glob(f"{stored}/*.safetensors")) > 2
    return stored, data


def settings(tmp, model, data, out, **over):
    keys = dict(model__init="weights", model__freeze="*.mlp.*", model__dtype="bf16", train__steps=3, eval__every=0,
                memory__nvme_paths=tmp)
    keys.update(over)
    return write_ini(out + ".ini", base(model, data, out, **keys))


def every_home_gives_the_same_bits(tmp, model, data):
    for dtype in ("bf16", "f32"):
        for freeze in ("*.mlp.*", "model.layers.*, lm_head.*"):
            got = []
            for home, over in (("host", {}), ("disk", {}), ("files", {}),
                               ("files", dict(memory__unit="half", memory__states="disk")),
                               ("disk", dict(memory__states="disk", memory__activations="disk")),
                               ("files", dict(memory__base_blocks=2, memory__slots=2)),
                               ("files", dict(memory__slots=2, memory__activations="offload", device__cpu_threads=1))):
                out = os.path.join(tmp, f"home-{len(got)}")
                shutil.rmtree(out, ignore_errors=True)
                save = len(got) == 0 or len(got) == 2  # and the state of the host's and of the first from files
                ini = settings(tmp, model, data, out, memory__base=home, model__dtype=dtype, model__freeze=freeze, **over)
                said = megatrain("run", ini, *([] if save else ["--no-save"]), env=PIECES).stderr
                got.append((losses(out), planes(f"{out}/checkpoint-3") if save else None))
                assert bool(re.search(r"blocks read from files", said)) == (home == "files"), said
            assert all(g[0] == got[0][0] for g in got) and got[0] == got[2], (dtype, freeze, "its home changes bits")


def cached_bytes(path):
    """Bytes of a file in the page cache."""
    size = os.path.getsize(path)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.open(path, os.O_RDONLY)
    at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    pages = (size + 4095) // 4096
    vec = (ctypes.c_ubyte * pages)()
    assert not libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), vec)
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    return 4096 * sum(v & 1 for v in vec)


def drop_from_cache(path):
    """Out of the page cache; False where the file system does not let go of it or has no direct I/O (tmpfs)."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return cached_bytes(path) == 0


def io_counters():
    """This process and its children that have ended."""
    with open("/proc/self/io") as f:
        return {k: int(v) for k, v in (line.split(": ") for line in f)}


def nothing_is_written_and_the_page_cache_stays_free(tmp, model, data):
    files = glob.glob(f"{model}/*.safetensors")
    direct = all([drop_from_cache(f) for f in files])
    out = os.path.join(tmp, "io")
    ini = settings(tmp, model, data, out, memory__base="files", memory__slots=2, train__steps=2)
    before = io_counters()
    said = megatrain("run", ini, "--no-save").stderr
    used = {k: v - before[k] for k, v in io_counters().items()}
    assert used["wchar"] < 1 << 20 and used["write_bytes"] < 1 << 20, used
    step = [m for m in metrics(out) if "loss" in m][-1]
    reads = MLP  # slots and staging hold all of so small a model over the turn to backward
    assert step["disk_read"]["weights"] >= reads, step
    assert sum(step["disk_write"].values()) == 0, step
    rows = re.findall(r"^  host +frozen weights  +\S", said, re.M)
    assert not rows, said  # none of it in host memory
    if direct:
        assert used["read_bytes"] >= 2 * reads, used
        cached = sum(cached_bytes(f) for f in files)
        assert cached < sum(os.path.getsize(f) for f in files) - 0.6 * MLP, (cached, MLP)  # beside readahead
    else:
        print("   (no direct I/O here: the page cache was not looked at)")


def tensor_at(model, name):
    for path in glob.glob(f"{model}/*.safetensors"):
        with open(path, "rb") as f:
            n, = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(n))
        if name in header:
            return path, 8 + n + header[name]["data_offsets"][0]
    raise AssertionError(name)


def a_bit_that_turns_in_the_file_stops_the_run(tmp, model, data):
    copy, name = os.path.join(tmp, "turned"), "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(model, copy)
    path, at = tensor_at(copy, name)
    out = os.path.join(tmp, "turn")
    ini = settings(tmp, copy, data, out, memory__base="files", train__steps=100000, log__every=1)
    run = subprocess.Popen([BINARY, "run", ini, "--no-save"], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if os.path.exists(f"{out}/metrics.jsonl") and len(losses(out)) > 1:
                break
            time.sleep(0.1)
        with open(path, "r+b") as f:
            f.seek(at + (1 << 20) + 12345)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ 4]))
        said = run.communicate()[1]
    finally:
        run.kill()
    assert run.returncode == 1 and name in said and path in said and "checksum" in said, (run.returncode, said[-2000:])


def what_cannot_be_is_refused(tmp, model, data):
    out = os.path.join(tmp, "refused")
    for over, words in ((dict(memory__base="disk", memory__nvme_paths=""), "memory.nvme_paths"),
                        (dict(memory__base="files", model__freeze="*norm*"), "1 MiB or more"),
                        (dict(memory__base="files", model__freeze=""), "nothing is frozen"),
                        (dict(memory__base="files", model__init="random"), "1 MiB or more"),
                        (dict(memory__base="files", checkpoint__frozen="copy"), "checkpoint.frozen = name"),
                        (dict(memory__base="drives"), "auto|host|disk|files")):
        said = megatrain("run", settings(tmp, model, data, out, **over), expect=2).stderr
        assert words in said, (over, said)
        assert not glob.glob(f"{out}/checkpoint-*")
    # a weight that is not finite, found when it is first read
    copy = os.path.join(tmp, "infinite")
    shutil.copytree(model, copy)
    path, at = tensor_at(copy, "model.layers.0.mlp.gate_proj.weight")
    with open(path, "r+b") as f:
        f.seek(at + 2 * 1000)
        f.write(b"\x80\x7f")
    for home in "host", "files":
        said = megatrain("run", settings(tmp, copy, data, out + home, memory__base=home), expect=3).stderr
        assert "gate_proj" in said and "element 1000" in said and "finite" in said, said


def weights_of(folder):
    out = {}
    for path in glob.glob(f"{folder}/*.safetensors"):
        out.update(read_safetensors(path))
    return out


def checkpoints_name_what_is_frozen(tmp, model, data):
    """Not a byte of it is in them; resuming verifies it, export completes it, another model is refused."""
    base_dir = os.path.join(tmp, "named-base")
    shutil.copytree(model, base_dir)
    def run(out, *args, expect=0, **over):
        ini = settings(tmp, base_dir, data, out, **dict(dict(train__steps=4), **over))
        return megatrain("run", ini, *args, env=PIECES, expect=expect)

    whole = os.path.join(tmp, "whole")
    run(whole)
    want = losses(whole), planes(f"{whole}/checkpoint-4")
    state = json.load(open(f"{whole}/checkpoint-4/megatrain/state.json"))
    names = {f"model.layers.{i}.mlp.{m}_proj.weight" for i in range(LAYERS) for m in ("gate", "up", "down")}
    assert set(state["frozen"]["tensors"]) == names and state["frozen"]["model"] == base_dir, state["frozen"]
    assert not names & set(weights_of(f"{whole}/checkpoint-4"))
    assert sum(os.path.getsize(f) for f in glob.glob(f"{whole}/checkpoint-4/**/*", recursive=True)) < 4 * MLP
    homes = "files", "host", "disk", "files"
    for i, (first, then) in enumerate(zip(homes, homes[1:])):
        out = os.path.join(tmp, f"resumed-{i}")
        run(out, "--max-steps", 2, memory__base=first)
        run(out, "--resume", memory__base=then)
        assert (losses(out), planes(f"{out}/checkpoint-4")) == want, (first, then)
    # the model is completed from its base
    stored, exported = weights_of(model), os.path.join(tmp, "completed")
    megatrain("export", f"{whole}/checkpoint-4", exported)
    got = weights_of(exported)
    assert set(got) == set(stored) and all(got[n] == stored[n] for n in names)
    megatrain("export", f"{whole}/checkpoint-4", exported + "-f32", "--dtype", "f32")
    assert all(struct.unpack("<f", weights_of(exported + "-f32")[n][2][:4])[0] ==
               struct.unpack("<f", b"\0\0" + stored[n][2][:2])[0] for n in names)
    # with copies, as before: everything is there
    copies = os.path.join(tmp, "copies")
    run(copies, checkpoint__frozen="copy")
    assert names <= set(weights_of(f"{copies}/checkpoint-4")) and losses(copies) == want[0]
    assert planes(f"{copies}/checkpoint-4") != want[1]
    # a bit of the base turns
    path, at = tensor_at(base_dir, "model.layers.0.mlp.down_proj.weight")
    with open(path, "r+b") as f:
        f.seek(at + 777)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    for home in "files", "host":
        out = os.path.join(tmp, "resumed-0")
        said = run(out, "--resume", memory__base=home, train__steps=6, expect=3).stderr
        assert "layers.0.mlp.down_proj" in said and "checksum" in said and "checkpoint" in said and path in said, said
        assert not os.path.exists(f"{out}/checkpoint-6")
    said = megatrain("export", f"{whole}/checkpoint-4", exported + "-2", expect=3).stderr
    assert "layers.0.mlp.down_proj" in said and not os.path.exists(exported + "-2"), said


def turn_a_bit(path, at):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def adapters_know_every_byte_of_their_base(tmp, model, data):
    """In whatever form it is: a bit that turns between two runs is found, by file and tensor, wherever the base lives."""
    wide, packed = os.path.join(tmp, "wide"), os.path.join(tmp, "nf4")
    megatrain("export", model, wide, "--dtype", "f32")
    megatrain("export", model, packed, "--quantize", "nf4")
    fused = fixture("gpt_oss")  # of all experts, transposed
    few = write_data(os.path.join(tmp, "few.jsonl"), vocab=96)
    up = "model.layers.1.mlp.up_proj.weight"
    for source, homes, names in ((model, ("files", "host"), (up, "model.norm.weight")), (wide, ("host",), (up,)),
                                 (packed, ("host", "disk"), (up, up + ".absmax", up + ".nested_absmax")),
                                 (fused, ("host",), ("model.layers.0.mlp.experts.down_proj",))):
        base_dir, out = os.path.join(tmp, "known-base"), os.path.join(tmp, "known")
        for home in homes:
            shutil.rmtree(base_dir, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(source, base_dir)
            shutil.rmtree(f"{base_dir}/megatrain", ignore_errors=True)
            for other in set(glob.glob(f"{base_dir}/*.safetensors")) - set(glob.glob(f"{base_dir}/model*")):
                os.remove(other)
            keys = dict(model__freeze="", adapter__kind="lora", adapter__rank=4, train__steps=4, memory__base=home)
            def run(*args, expect=0, **over):
                return megatrain("run", settings(tmp, base_dir, few if source == fused else data, out, **{**keys, **over}), *args, expect=expect).stderr
            run("--max-steps", 2)
            state = json.load(open(f"{out}/checkpoint-2/megatrain/state.json"))
            assert "base_sum" not in state and state["frozen"]["model"] == base_dir
            for name in names:
                path, at = tensor_at(base_dir, name)
                turn_a_bit(path, at + 50)
                for then in homes:
                    said = run("--resume", expect=3, memory__base=then)
                    said_of = name.split(".weight")[0].replace("experts.", "experts.0.")
                    assert said_of in said and path in said and "checksum" in said and "checkpoint" in said, (name, said)
                    assert not os.path.exists(f"{out}/checkpoint-4")
                turn_a_bit(path, at + 50)
            run("--resume", memory__base=homes[-1])
            assert os.path.exists(f"{out}/checkpoint-4")


def adapters_are_used_on_their_own_base(tmp, model, data):
    """eval and export --merge compare it with what the checkpoint knows; another format of it is not compared."""
    base_dir, wide, out = (os.path.join(tmp, n) for n in ("own-base", "own-wide", "own"))
    shutil.copytree(model, base_dir)
    megatrain("export", base_dir, wide, "--dtype", "f32")
    keys = dict(model__freeze="", adapter__kind="lora", adapter__rank=4, train__steps=1)
    megatrain("run", settings(tmp, base_dir, data, out, **keys))
    adapter, name = f"{out}/checkpoint-1", "model.layers.2.self_attn.o_proj.weight"
    homes = {home: settings(tmp, base_dir, data, f"{out}-{home}", memory__base=home, **keys) for home in ("host", "files")}
    def check(of, adapter, expect=0):
        return megatrain("check", settings(tmp, of, data, f"{out}-check", model__freeze=""), "--adapter", adapter, expect=expect)
    def uses(of):
        yield lambda **kw: megatrain("export", "--merge", adapter, f"{out}-merged", "--model", of, **kw)
        for ini in homes.values():
            yield lambda **kw: megatrain("eval", ini, "--adapter", adapter, "--model", of, **kw)
        yield lambda **kw: check(of, adapter, **kw)
    for use in uses(base_dir):
        assert "not checked" not in use().stderr
    shutil.rmtree(f"{out}-merged")
    for use in uses(wide):
        assert "not checked" in use().stderr
    shutil.rmtree(f"{out}-merged")
    # check says what it compared, in packed models, too
    tensors = sum(len(read_safetensors(f)) for f in glob.glob(f"{base_dir}/*.safetensors"))
    assert f"Base      {tensors} tensors of the model are those" in check(base_dir, adapter).stdout
    said = check(wide, adapter)
    assert "not compared" in said.stdout and "not checked" in said.stderr, said
    megatrain("export", adapter, f"{out}-plain")
    assert "say nothing" in check(base_dir, f"{out}-plain").stdout
    for kind in "nf4", "fp8":
        packed = f"{out}-{kind}"
        megatrain("export", model, packed, "--quantize", kind)
        megatrain("run", settings(tmp, packed, data, packed + "-out", **keys))
        said = check(packed, f"{packed}-out/checkpoint-1")
        assert f"Base      {tensors} tensors" in said.stdout, (tensors, said)
        path, at = tensor_at(packed, "model.layers.1.mlp.up_proj.weight")
        turn_a_bit(path, at + 3)
        said = check(packed, f"{packed}-out/checkpoint-1", expect=3).stderr
        assert "layers.1.mlp.up_proj" in said and path in said and "checksum" in said, said
    for name in "model.layers.2.self_attn.o_proj.weight", "model.layers.1.mlp.up_proj.weight":
        path, at = tensor_at(base_dir, name)
        turn_a_bit(path, at + 200)
        for use in uses(base_dir):
            said = use(expect=3).stderr
            assert name in said and path in said and "checksum" in said, said
        assert not os.path.exists(f"{out}-merged")
        turn_a_bit(path, at + 200)


def packed_bases_are_told_from_plain_ones(tmp, model, data):
    out, packed = os.path.join(tmp, "packing"), os.path.join(tmp, "fp8")
    keys = dict(model__freeze="", adapter__kind="lora", adapter__rank=4, train__steps=1)
    ini = settings(tmp, model, data, out, model__base_dtype="nf4", **keys)
    megatrain("run", ini)
    plain = settings(tmp, model, data, out + "-plain", **keys)
    adapter, says = ["--adapter", f"{out}/checkpoint-1"], "set model.base_dtype = nf4"
    assert says in megatrain("eval", plain, *adapter).stderr
    assert says not in megatrain("eval", ini, *adapter).stderr
    said = megatrain("export", model, packed, "--quantize", "fp8").stderr
    assert "multiples of 128" in said and "[64, 256]" in said, said
    said = megatrain("export", "--merge", adapter[1], packed + "-merged", "--model", packed).stderr # decoded
    assert "decode" in said and os.path.exists(packed + "-merged/config.json"), said
    with open(packed + "-merged/config.json") as f:
        assert "quantization_config" not in f.read()


def main():
    tmp = tempfile.mkdtemp(prefix="mt-base-")
    try:
        model, data = make_model(tmp)
        for case in sys.argv[1:]:
            globals()[case](tmp, model, data)
            print("ok", case)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
