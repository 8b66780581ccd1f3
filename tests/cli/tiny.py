# SPDX-License-Identifier: Apache-2.0
"""Small models, data and runs for the tests that drive the binary. Standard library only."""
import glob
import json
import os
import random
import shutil
import struct
import subprocess
import sys

from seeded import fixture, read_safetensors, write_safetensors  # noqa: F401, for all that import this

BINARY = os.environ["MEGATRAIN"]
DEVICE = os.environ.get("MEGATRAIN_TEST_DEVICE", "cpu")
FULL = bool(os.environ.get("MEGATRAIN_TEST_FULL"))
# Under a sanitizer, or on the emulated GPU, everything takes several times as long: models are smaller there.
SLOW = bool(os.environ.get("MEGATRAIN_TEST_SLOW")) and not FULL
# What is only wanted to compare with may come from another build of the same sources, which has the same bits and
# budgets: one without sanitizers takes a fraction of the time.
ORACLE = os.environ.get("MEGATRAIN_ORACLE", BINARY) if DEVICE == "cpu" else BINARY

#: dead buffers and scratch become NaN, so that what reads them shows
POISON = {"MEGATRAIN_POISON": "1"}

FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 12, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                                          "moe_intermediate_size": 48, "norm_topk_prob": True,
                                          "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                                          "shared_expert_intermediate_size": 40, "norm_topk_prob": False,
                                          "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "glm4_moe": ("Glm4MoeForCausalLM", {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                                        "topk_group": 1, "moe_intermediate_size": 48, "n_shared_experts": 1,
                                        "first_k_dense_replace": 0, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
                                        "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "gpt_oss": ("GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48,
                                      "sliding_window": 12, "attention_bias": True, "rope_scaling": {
                                          "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                          "truncate": False, "original_max_position_embeddings": 64}}),
    "gemma3_text": ("Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 12,
                                          "sliding_window_pattern": 2, "final_logit_softcapping": 5.0,
                                          "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6,
                                          "rope_local_base_freq": 10000.0, "tie_word_embeddings": True}),
    "gemma4_text": ("Gemma4ForCausalLM", {"head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1,
                                          "attention_k_eq_v": False, "hidden_size_per_layer_input": 0, "sliding_window": 12,
                                          "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                                          "rope_parameters": {
                                              "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                                                 "partial_rotary_factor": 0.25},
                                              "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
                                            "full_attention_interval": 2}),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "arcee": ("ArceeForCausalLM", {"hidden_act": "relu2"}),
    "nemotron": ("NemotronForCausalLM", {"hidden_act": "relu2"}),
    "starcoder2": ("Starcoder2ForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "internlm3": ("InternLM3ForCausalLM", {}),
    "iquestcoder": ("IQuestCoderForCausalLM", {}),
    "youtu": ("YoutuForCausalLM", {}),
    "apertus": ("ApertusForCausalLM", {"hidden_act": "xielu"}),
    "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {"num_local_experts": 0, "position_embedding_type": "nope"}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granite4_moe": ("GraniteMoeHybridForCausalLM", {"model_type": "granitemoehybrid"}),
    "nemotron_h": ("NemotronHForCausalLM", {"mlp_hidden_act": "relu2"}),
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "seed_oss": ("SeedOssForCausalLM", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "cwm": ("CwmForCausalLM", {}),
    "ministral": ("MinistralForCausalLM", {}),
    "glm": ("GlmForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "afmoe": ("AfmoeForCausalLM", {}),
    "muse_glimmer_text": ("MuseGlimmerTextModel", {"hidden_activation": "silu"}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
}


def patience(seconds):
    """A limit for what takes no longer on an idle machine, longer by as much as this one is busy. Only for what must come
    soon: a test that hangs or takes too long is ended from outside (tests/limit.py)."""
    return seconds * max(1.0, os.getloadavg()[0] / os.cpu_count())


def part(name):
    """Whether a part of a test file is to be run: "first", which is in the first tier, or "rest". All where the command
    line names none."""
    return name in sys.argv[1:] or not {"first", "rest"} & set(sys.argv[1:])


def chosen(tests, first=()):
    """Those of the tests, which are functions, that the command line names: by their names, or as the part that they are in."""
    words = set(sys.argv[1:])
    return [t for t in tests if not words or t.__name__ in words or ("first" if t in first else "rest") in words]


def config(family="qwen3", **over):
    arch, extra = FAMILIES[family]
    c = {
        "architectures": [arch], "model_type": family, "hidden_size": 64, "intermediate_size": 88,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "initializer_range": 0.05, "tie_word_embeddings": False, "hidden_act": "silu",
        "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "bfloat16",
    }
    c.update(extra)
    c.update(over)
    return c


def write_model(path, cfg):
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(cfg, f, indent=2)
    return path


def write_data(path, n=60, seed=1, longest=60, vocab=272):
    """Ragged samples of token ids, with the first third of each not trained."""
    r = random.Random(seed)
    with open(path, "w") as f:
        for _ in range(n):
            ids = [r.randrange(vocab) for _ in range(r.randrange(3, longest))]
            labels = [-100] * (len(ids) // 3) + ids[len(ids) // 3:]
            f.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return path


def write_ini(path, sections):
    with open(path, "w") as f:
        for name, keys in sections.items():
            f.write(f"[{name}]\n")
            for k, v in keys.items():
                f.write(f"{k} = {v}\n")
    return path


def base(model, data, out, **over):
    s = {
        "model": {"path": model, "init": "random", "dtype": "f32"},
        "data": {"train": data, "eval": "10%", "seq_len": 64, "cache_dir": os.path.join(os.path.dirname(data), "cache")},
        "train": {"steps": 10, "batch_size": 6, "micro_batch": 2, "learning_rate": "1e-3", "warmup": 2,
                  "grad_clip": 0.5, "schedule": "linear"},
        "optimizer": {"weight_decay": 0.1},
        "memory": {"device_budget": "64MiB"},
        "eval": {"every": 0, "at_start": "off"},
        "checkpoint": {"dir": out, "every": 0, "keep": 20},
        "device": {"kind": DEVICE, "cpu_threads": 2},
    }
    for key, value in over.items():
        section, name = key.split("__")
        s.setdefault(section, {})[name] = value
    return s


def megatrain(*args, env=None, expect=0, stdin=None, binary=BINARY, cwd=None):
    e = dict(os.environ)
    e.update(env or {})
    p = subprocess.run([binary, *map(str, args)], capture_output=True, text=True, env=e, cwd=cwd, input=stdin)
    if expect is not None and p.returncode != expect:
        sys.stderr.write(p.stdout + p.stderr)
        raise AssertionError(f"megatrain {' '.join(map(str, args))}: exit {p.returncode}, expected {expect}")
    return p


def drawn(*folders, html):
    """{name: SVG} of the pictures of a report. Without Node.js only the page is written, and nothing is drawn: {}."""
    there = shutil.which("node")
    megatrain("-q", "report", *folders, "--html", html, *(["--svg", html + ".svg"] if there else []))
    names = os.listdir(html + ".svg") if there else []
    pictures = {}
    for name in names:
        with open(os.path.join(html + ".svg", name)) as f:
            pictures[name[:-4]] = f.read()
    return pictures


def read_until(run, text):
    """What a process has said on its standard error, up to a line with this text."""
    said = ""
    while text not in said:
        line = run.stderr.readline()
        assert line, f"it ended without {text!r}: {said}"
        said += line
    return said


def with_weights(tmp, model, data, name="seed"):
    """The folder of the model as it is after one step: with weights, in bf16."""
    out = os.path.join(tmp, name)
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, train__steps=1, checkpoint__save="weights")))
    return os.path.join(out, "checkpoint-1")


def run_in(tmp, name, model, data, over, *args, env=None):
    """The folder of a run with these keys, named after it."""
    out = os.path.join(tmp, name.replace(" ", "-"))
    megatrain("-q", "run", write_ini(out + ".ini", base(model, data, out, **over)), *args, env=env)
    return out


def least_host(tmp, model, data, over, more=128):
    """The least host budget that a run is accepted with, and `more` KiB, as a value of memory.host_budget."""
    low, high = 1 << 10, 1 << 18
    while high - low > max(more, 16):
        middle = (low + high) // 2
        ini = write_ini(os.path.join(tmp, "probe.ini"),
                        base(model, data, os.path.join(tmp, "none"), **{**over, "memory__host_budget": f"{middle}KiB"}))
        if megatrain("-q", "run", "--dry-run", ini, expect=None).returncode:
            low = middle
        else:
            high = middle
    return f"{high + more}KiB"


def metrics(out):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [json.loads(l) for l in f]


def losses(out):
    return [(m["step"], m["loss"], m["grad_norm"], *([m["aux_loss"]] if "aux_loss" in m else []))
            for m in metrics(out) if "loss" in m]


def planes(checkpoint):
    """All bytes of the training state's tensors, by file."""
    d = os.path.join(checkpoint, "megatrain")
    return {n: open(os.path.join(d, n), "rb").read() for n in sorted(os.listdir(d)) if n.endswith(".safetensors")}


def trained_planes(checkpoint):
    """Of the training state, what belongs to tensors that are trained."""
    d, out = os.path.join(checkpoint, "megatrain"), {}
    for n in os.listdir(d):
        if n.endswith(".safetensors"):
            t = read_safetensors(os.path.join(d, n))
            out.update({k: v for k, v in t.items() if k.rsplit(".", 1)[0] + ".exp_avg" in t})
    return out


def middle_of(model, name):
    """64 bytes in the middle of a tensor."""
    for path in glob.glob(model + "/model*.safetensors"):
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            if name in header:
                begin, end = header[name]["data_offsets"]
                f.seek((begin + end) // 2, 1)
                return f.read(64)
    raise AssertionError(name)


def flip_in_memory(pid, what, rng):
    """Flips a bit wherever writable memory of the process has these bytes in large mappings; [(address, byte as it was)]."""
    found = []
    with open(f"/proc/{pid}/maps") as f:
        maps = [line.split() for line in f]
    with open(f"/proc/{pid}/mem", "r+b", 0) as f:
        for m in maps:
            begin, end = (int(x, 16) for x in m[0].split("-"))
            if not m[1].startswith("rw") or len(m) > 5 or end - begin > 1 << 30: # a sanitizer maps terabytes
                continue
            f.seek(begin)
            try:
                data = f.read(end - begin)
            except OSError:
                continue
            at = data.find(what)
            if at >= 0:
                place = begin + at + rng.randrange(len(what))
                f.seek(place)
                was = f.read(1)
                f.seek(place)
                f.write(bytes([was[0] ^ 1 << rng.randrange(8)]))
                found.append((place, was))
    assert found
    return found
