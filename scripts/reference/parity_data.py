# SPDX-License-Identifier: Apache-2.0
"""Compares the data helper, through `megatrain data`, with transformers: ids of apply_chat_template, and masks.

For each style: a stand-in of the family's tokenizer, thousands of generated conversations; every token must be equal.
Masks are compared with those that transformers makes of the same template with its assistant's words between
{% generation %} and {% endgeneration %}, which megatrain is not shown, and again with it shown.
    parity_data.py [--n N] [STYLE]...        compare
    parity_data.py --write-fixtures DIR [STYLE]...      the small cases that the test without transformers uses
"""
import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "cli"))
import transformers
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from families import DATE, EPOCH, FAMILIES, TOOLED, conversation, template_of, write_tokenizer
from tiny import base, config, megatrain, write_ini, write_model

#: marks around the assistant's words: (text in the template, the same with marks)
MARKED = {
    "chatml": [("{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}",
                "{%- if message['role'] == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}{%- generation -%}{{- message['content'] + "
                "'<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}{%- else -%}{{- '<|im_start|>' + message['role'] + '\\n' + "
                "message['content'] + '<|im_end|>\\n' -}}{%- endif -%}")],
    "zephyr": [("{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}",
                "{%- if message.role == 'assistant' -%}{{- '<|assistant|>\\n' -}}{%- generation -%}{{- message.content + eos_token -}}"
                "{%- endgeneration -%}{{- '\\n' -}}{%- else -%}{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}"
                "{%- endif -%}")],
    "mistral": [("{{- ' ' + message.content + eos_token -}}",
                 "{%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}")],
    "gemma": [("message.content | trim + '<end_of_turn>\\n' -}}",
               "'' -}}{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content | trim + '<end_of_turn>' -}}"
               "{%- endgeneration -%}{{- '\\n' -}}{%- else -%}{{- message.content | trim + '<end_of_turn>\\n' -}}{%- endif -%}")],
    "llama3": [("{%- if message.tool_calls -%}", "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content | trim + "
                "'<|eot_id|>' -}}{%- endgeneration -%}{%- else -%}{%- if message.tool_calls -%}"),
               ("{{- '<|eot_id|>' -}}\n", "{{- '<|eot_id|>' -}}{%- endif -%}\n")],
    "harmony": [("{{- '<|start|>assistant' -}}\n{%- if message.thinking", "{{- '<|start|>assistant' -}}\n{%- generation -%}\n{%- if message.thinking"),
                ("{%- endif -%}\n{%- elif message.role == 'tool'", "{%- endif -%}\n{%- endgeneration -%}\n{%- elif message.role == 'tool'")],
    "glm4": [("{{- '<|assistant|>' -}}", "{{- '<|assistant|>' -}}{%- generation -%}"),
             ("{%- endfor -%}\n{%- elif m.role == 'tool'", "{%- endfor -%}\n{%- endgeneration -%}\n{%- elif m.role == 'tool'")],
    "minimax": [("{{- thought + '\\n</think>\\n\\n' -}}\n{%- endif -%}\n{{- content -}}",
                 "{%- endif -%}\n{%- generation -%}\n{%- if thought and loop.index0 > ns.last_user -%}{{- thought + '\\n</think>\\n\\n' -}}{%- endif -%}"
                 "\n{{- content -}}"),
                ("{{- '[e~[' -}}\n", "{{- '[e~[' -}}\n{%- endgeneration -%}\n")],
    "qwen3": [("{{- '<|im_start|>assistant\\n' -}}\n{%- if loop.index0", "{{- '<|im_start|>assistant\\n' -}}\n{%- generation -%}\n{%- if loop.index0"),
              ("{%- endfor -%}\n{{- '<|im_end|>\\n' -}}\n{%- elif message.role == 'tool' -%}",
               "{%- endfor -%}\n{{- '<|im_end|>' -}}\n{%- endgeneration -%}{{- '\\n' -}}\n{%- elif message.role == 'tool' -%}")],
}


#: where nothing ends a turn but the header of the next, that is what the model writes last
ENDED_BY_NEXT = {"glm4": ("<|user|>", "<|observation|>")}


class FixedDay(datetime.datetime):
    """The clock of templates that print a date."""

    @classmethod
    def now(cls, tz=None):
        return cls.strptime(DATE, "%Y-%m-%d")


def with_ends(tok, style, ids, mask):
    """If the last character has several tokens, the mask has only the first."""
    ends = [tok.convert_tokens_to_ids(t) for t in ENDED_BY_NEXT.get(style, ())]
    mask = list(mask)
    for k, i in enumerate(ids):
        last = next((j for j in range(k - 1, max(k - 4, -1), -1) if mask[j]), None)
        if i in ends and last is not None:
            mask[last:k + 1] = [1] * (k + 1 - last)
    return mask


def marked(style):
    """The style's template with marks; the rendering is the same."""
    text = template_of(style)
    for old, new in MARKED[FAMILIES[style][0]]:
        assert text.count(old) == 1, (style, old, text.count(old))
        text = text.replace(old, new)
    return text


def ours(tmp, name, model, data, n, template="model"):
    ini = write_ini(os.path.join(tmp, name + ".ini"), base(model, data, os.path.join(tmp, "out"), data__eval="", data__seq_len="1Mi",
        data__cache_dir=os.path.join(tmp, "cache"), data__template=template, train__batch_size=1))
    out = megatrain("-q", "data", "show", ini, "--json", "--samples", n, env={"SOURCE_DATE_EPOCH": EPOCH}).stdout
    return [json.loads(l) for l in out.splitlines()]


def theirs(model, samples, template, style):
    tok = AutoTokenizer.from_pretrained(model)
    out = []
    for s in samples:
        got = tok.apply_chat_template(s["messages"], tools=s.get("tools"), chat_template=template, tokenize=True, return_dict=True,
                                      return_assistant_tokens_mask=True)
        out.append((got["input_ids"], with_ends(tok, style, got["input_ids"], got["assistant_masks"])))
    return out


def compare(style, n, tmp):
    r = random.Random(style)
    samples = [conversation(r, style) for _ in range(n)]
    model = write_model(os.path.join(tmp, style), config("llama", vocab_size=1000))
    write_tokenizer(model, style, as_file=style in ("gemma", "qwen3"))
    data = os.path.join(tmp, style + ".jsonl")
    with open(data, "w") as f:
        for s in samples:
            f.write(json.dumps(s, ensure_ascii=r.random() < 0.5) + "\n")
    t0 = time.time()
    a = ours(tmp, style, model, data, n)
    with open(os.path.join(tmp, style + ".jinja"), "w") as f:
        f.write(marked(style))
    b = ours(tmp, style + "-marked", model, data, n, os.path.join(tmp, style + ".jinja"))
    want = theirs(model, samples, marked(style), style)
    plain = AutoTokenizer.from_pretrained(model)
    assert len(a) == len(b) == n, (len(a), n)
    bad_ids = bad_masks = bad_marked = tokens = 0
    for k, (x, y, (ids, mask)) in enumerate(zip(a, b, want)):
        reference = plain.apply_chat_template(samples[k]["messages"], tools=samples[k].get("tools"), return_dict=True)["input_ids"]
        tokens += len(ids)
        mask = [0] + mask[1:]
        bad_ids += x["input_ids"] != reference or y["input_ids"] != ids
        bad_masks += [int(l != -100) for l in x["labels"]] != mask
        bad_marked += [int(l != -100) for l in y["labels"]] != mask
    longest = max(len(w[0]) for w in want)
    good = not (bad_ids or bad_masks or bad_marked)
    print(f"{'ok  ' if good else 'FAIL'} {style:8s} {n} conversations, {tokens} tokens (longest {longest}): ids differ in {bad_ids}, "
          f"masks in {bad_masks}, masks of the marked template in {bad_marked}  ({time.time() - t0:.0f} s)", flush=True)
    return good


def write_fixtures(folder, styles):
    """Per style: a tokenizer, and conversations with the ids and masks that transformers gives."""
    for style in styles:
        r = random.Random(style + "fixture")
        path = os.path.join(folder, style)
        write_tokenizer(path, style, size=340, as_file=style == "gemma")
        cases = []
        while len(cases) < 14:
            s = conversation(r, style)
            if len(json.dumps(s)) < 1500 and ("tools" in s or style not in TOOLED or len(cases) > 3):
                cases.append(s)
        for s, (ids, mask) in zip(cases, theirs(path, cases, marked(style), style)):
            s["ids"], s["mask"] = ids, "".join(map(str, mask))
        with open(os.path.join(path, "cases.jsonl"), "w") as f:
            for s in cases:
                f.write(json.dumps(s) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--n", type=int, default=1000)
    p.add_argument("--write-fixtures")
    p.add_argument("styles", nargs="*")
    args = p.parse_args()
    transformers.logging.set_verbosity_error()
    chat_template_utils.datetime = FixedDay
    if args.write_fixtures:
        write_fixtures(args.write_fixtures, args.styles or FAMILIES)
        return
    with tempfile.TemporaryDirectory() as tmp:
        results = [compare(style, args.n, tmp) for style in args.styles or FAMILIES]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed; transformers {transformers.__version__}")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
