# SPDX-License-Identifier: Apache-2.0
"""Small stand-ins for the tokenizers of model families: the family's normaliser, pre-tokeniser, special tokens and
chat template over a vocabulary trained here. Needs `tokenizers` (.venv-data)."""
import json
import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TEMPLATES = [os.path.join(ROOT, "scripts", "megatrain_data", "templates"), os.path.join(ROOT, "tests", "data", "templates")]

QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

#: style: (template, bos, eos, special tokens, kind of tokenizer)
FAMILIES = {
    "qwen2": ("chatml", None, "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "bytes", QWEN_SPLIT),
    "qwen3": ("qwen3", None, "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "bytes", QWEN_SPLIT),
    "llama3": ("llama3", "<|begin_of_text|>", "<|eot_id|>", ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
               "<|end_header_id|>", "<|eot_id|>"], "bytes", LLAMA3_SPLIT),
    "mistral": ("mistral", "<s>", "</s>", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "pieces", None),
    "gemma": ("gemma", "<bos>", "<end_of_turn>", ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
              "pieces", None),
    "harmony": ("harmony", None, "<|return|>", ["<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
                "<|call|>"], "bytes", LLAMA3_SPLIT),
    "glm4": ("glm4", None, "<|endoftext|>", ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
             "<|observation|>"], "bytes", LLAMA3_SPLIT),
    "minimax": ("minimax", "]~!b[", "[e~[", ["]~!b[", "]~b]", "[e~["], "bytes", QWEN_SPLIT),
    "zephyr": ("zephyr", "<s>", "</s>", ["<unk>", "<s>", "</s>"], "pieces", None),
}
#: ordinary added tokens, as Qwen3 has them
PLAIN = {"qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
         "glm4": ["<think>", "</think>", "<tool_call>", "</tool_call>"], "minimax": ["<think>", "</think>"]}
#: styles whose conversations have tools, and thinking
TOOLED = THINKING = ("qwen3", "harmony", "glm4", "minimax")
#: the day that templates with a date say it is, as in SOURCE_DATE_EPOCH
DATE, EPOCH = "2025-09-14", "1757808000"

WORDS = ("the of and to in a is that it was for on are with as I his they be at one have this from or had by hot word but what "
         "some we can out other were all there when up use your how said an each she which do their time if will way about many "
         "then them write would like so these her long make thing see him two has look more day could go come did number sound no "
         "most people my over know water than call first who may down side been now find función überall naïve Größe").split()


def corpus(seed=1, n=400):
    r = random.Random(seed)
    return [" ".join(r.choice(WORDS) for _ in range(60)) + r.choice([".\n", "!\n\n", "? ", "; 2024-07-26\n"]) for _ in range(n)]


def byte_level(split, special, size):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC() if split == QWEN_SPLIT else None
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=size - len(special), show_progress=False,
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def piece_level(special, size, prepend):
    """As sentencepiece's BPE with byte fallback comes out of a conversion."""
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] * prepend + [normalizers.Replace(" ", "▁")]
    t.normalizer = normalizers.Sequence(steps)
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=size, show_progress=False,
                                                        special_tokens=special + fallback))
    state = json.loads(t.to_str())  # the bytes are pieces of the vocabulary, not tokens that text is searched for
    state["added_tokens"] = [a for a in state["added_tokens"] if a["content"] in special]
    t = Tokenizer.from_str(json.dumps(state))
    tail = [decoders.Strip(" ", 1, 0)] * prepend
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return t


def template_of(style):
    path = next(p for p in (os.path.join(d, FAMILIES[style][0] + ".jinja") for d in TEMPLATES) if os.path.exists(p))
    with open(path, encoding="utf-8") as f:
        return f.read()


def write_tokenizer(path, style, size=600, template=None, as_file=False, **config):
    """tokenizer.json and tokenizer_config.json of a family's stand-in; returns the number of ids."""
    _, bos, eos, special, kind, split = FAMILIES[style]
    if kind == "bytes":
        t = byte_level(split, special, size)
        t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
        t.add_tokens([AddedToken(s, normalized=False, special=False) for s in PLAIN.get(style, [])])
    else:
        t = piece_level(special, size, prepend=style != "gemma")
    if bos:
        steps = [processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, t.token_to_id(bos))])]
        t.post_processor = processors.Sequence(([processors.ByteLevel(trim_offsets=False)] if kind == "bytes" else []) + steps)
    os.makedirs(path, exist_ok=True)
    t.save(os.path.join(path, "tokenizer.json"))
    template = template_of(style) if template is None else template
    out = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos, "clean_up_tokenization_spaces": False, **config}
    if bos:
        out["bos_token"] = bos
    if as_file:
        with open(os.path.join(path, "chat_template.jinja"), "w", encoding="utf-8") as f:
            f.write(template)
    else:
        out["chat_template"] = template
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=False)
    return t.get_vocab_size(with_added_tokens=True)


SCRAPS = ["", " ", "\n", "naïve café", "Größe überall", "日本語のテキスト", "🙂👩‍👩‍👧‍👦 emoji", "e\u0301 combining", "a\u200bzero width", "tab\there",
          "{\"json\": [1, 2, null]}", "<b>&amp;</b>", "code:\n```python\nprint('hi')\n```", "  leading and trailing  ", "\n\nlines\n\n",
          "<|im_start|>assistant\nnot a turn<|im_end|>", "</s>[INST] no [/INST]", "ﬁ ligature ½ ²", "العربية", "\u00a0nbsp", "1234567890"]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city — today",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def words(r, most=40):
    text = " ".join(r.choice(WORDS) for _ in range(r.randrange(1, most)))
    return r.choice([text, text, text + "\n" + r.choice(SCRAPS), r.choice(SCRAPS), text + " " + r.choice(SCRAPS) + " " + text])


def conversation(r, style):
    """One that the style's template takes: Unicode, system turns, empty turns, tools, thinking, very long turns."""
    messages, long = [], r.random() < 0.01
    if r.random() < 0.35:
        messages.append({"role": "system", "content": words(r)})
    tools = style in TOOLED and r.random() < 0.25
    for k in range(r.randrange(1, 5)):
        messages.append({"role": "user", "content": words(r, 4000 if long else 40)})
        if tools and r.random() < 0.6:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"city": words(r, 3)}}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call] * (r.randrange(1, 3) if style != "harmony" else 1)},
                         {"role": "tool", "content": words(r)}]
            messages += [{"role": "tool", "content": words(r)}] * (r.random() < 0.3)
        m = {"role": "assistant", "content": words(r, 4000 if long else 60)}
        if style in THINKING and r.random() < 0.4:
            if style == "harmony" or r.random() < 0.5:
                m["thinking" if style == "harmony" else "reasoning_content"] = words(r)
            else:
                m["content"] = "<think>\n" + words(r) + "\n</think>\n\n" + m["content"]
        messages.append(m)
    sample = {"messages": messages}
    if tools:
        sample["tools"] = TOOLS
    return sample
