# SPDX-License-Identifier: Apache-2.0
"""Answers with a preference: records to a prompt and its answers, and these to tokens.

The rules are TRL's. A conversation's prompt is rendered with the assistant's header, and each answer as a whole
conversation; what both renderings have in common, in tokens, is the prompt, and everything after it is trained."""
import os
from collections import namedtuple

import numpy as np

from .formats import CHATS, Bad, alpaca, chat, sharegpt

# answers: the chosen and the rejected one, None: there is none. Strings; or chats, of which prompt is the beginning
Answers = namedtuple("Answers", "prompt answers")
FORMATS = ("preference", "rated")
QUESTIONS = ("question", "query", "input", "problem", "context")  # what a prompt may be called


def is_chat(value):
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def common_messages(a, b):
    n = 0
    while n < min(len(a), len(b)) - 1 and a[n] == b[n]:
        n += 1
    return n


def split_prompt(prompt, chosen, rejected):
    """(prompt, chosen, rejected): a prompt that is missing, or given beside answers that hold it, is their beginning."""
    chats = is_chat(chosen) and is_chat(rejected)
    if not chats and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise Bad('"chosen" and "rejected" must both be strings, or both be lists of messages')
    if prompt is not None and is_chat(prompt) == chats and isinstance(prompt, (str, list)):
        return prompt, chosen, rejected
    if prompt is not None and not chats:
        raise Bad('"prompt" must be a string, as "chosen" is')
    if chats:
        n = common_messages(chosen, rejected)
    else:
        n = len(os.path.commonprefix([chosen, rejected]))
        n -= n > 0 and chosen[n - 1] == " "
    return chosen[:n], chosen[n:], rejected[n:]


def of_parts(record, prompt, answers):
    if isinstance(prompt, str):
        return Answers(prompt, answers)
    if not prompt:
        raise Bad("the answers have no prompt in common")
    return Answers(chat(prompt, record), [a and chat(prompt + a, record) for a in answers])


def own_entry(record):
    """The entry that a dataset_info.json would have for a record with the turns before its answers, and no prompt; else {}."""
    key = next((k for k, _ in CHATS if record.get(k)), None)
    if key is None or record.get("prompt") is not None or is_chat(record.get("chosen")):
        return {}
    return {"formatting": "alpaca"} if key == "instruction" else {"formatting": "sharegpt", "columns": {"messages": key}}


def preference(record, entry):
    entry = entry or own_entry(record)
    if entry:
        return ranked(record, entry)
    prompt, chosen, rejected = record.get("prompt"), record.get("chosen"), record.get("rejected")
    asked = next((k for k in QUESTIONS if isinstance(record.get(k), str) and record[k]), None)
    if prompt is None and asked and not is_chat(chosen):
        raise Bad(f'there is no "prompt", but "{asked}": name it by data.columns = instruction:{asked} (a turn of the chat template) or '
                  f'prompt:{asked} (text as it stands)')
    prompt, chosen, rejected = split_prompt(prompt, chosen, rejected)
    return of_parts(record, prompt, [chosen, rejected])


def label_of(record, name):
    """What a record says of its answer; a table of text has words."""
    said = {"true": True, "1": True, "false": False, "0": False}.get(str(record.get(name)).lower())
    if said is None:
        raise Bad(f'"{name}" must be true or false')
    return said


def rated(record, entry):
    entry = entry or own_entry(record)
    label = label_of(record, (entry.get("columns") or {}).get("kto_tag", "label"))
    if entry:
        whole = of_entry(record, entry)
        sample = Answers(whole._replace(messages=whole.messages[:-1], flags=whole.flags[:-1]), [whole, None])
    else:
        prompt, completion = record.get("prompt"), record.get("completion")
        if not (isinstance(prompt, str) and isinstance(completion, str)) and not (is_chat(prompt) and is_chat(completion)):
            raise Bad('"prompt" and "completion" must both be strings, or both be lists of messages')
        sample = of_parts(record, prompt, [completion, None])
    return sample if label else Answers(sample.prompt, sample.answers[::-1])


def of_entry(record, entry):
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    return sharegpt(record, columns, tags) if entry.get("formatting") == "sharegpt" else alpaca(record, columns)


def ranked(record, entry):
    """LLaMA-Factory's "ranking": answers beside the conversation, or as two values of its response."""
    columns, both = entry.get("columns") or {}, []
    for key in ("chosen", "rejected"):
        value = record.get(columns.get(key, key))
        if value is None:
            raise Bad(f'"{columns.get(key, key)}" is missing')
        if entry.get("formatting") == "sharegpt":
            turns = columns.get("messages", "conversations")
            both.append(of_entry({**record, turns: (record.get(turns) or []) + [value]}, entry))
        else:
            both.append(of_entry({**record, columns.get("response", "output"): value}, entry))
    prompt = both[0]._replace(messages=both[0].messages[:-1], flags=both[0].flags[:-1])
    return Answers(prompt, both)


def convert(record, name, entry):
    if not isinstance(record, dict):
        raise Bad("a sample must be a JSON object")
    return (preference if name == "preference" else rated)(record, entry)


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def tokens(encoder, sample, odd, index):
    """(ids of the prompt, [ids of prompt and answer])."""
    tok, join = encoder.tok, lambda *parts: np.concatenate([np.array(p, np.uint32) for p in parts])
    if isinstance(sample.prompt, str):
        texts = [sample.prompt] + [sample.prompt + a for a in sample.answers if a is not None]
    else:
        texts = [encoder.render(sample.prompt, prompt=True)[1].text]
        texts += [encoder.render(a, odd=odd, index=index)[1].text for a in sample.answers if a is not None]
    ids = tok.encode(texts)
    if isinstance(sample.prompt, str) or tok.bytes:
        ids = [join(encoder.begun(i), i) for i in ids]
        ids[1:] = [join(i, encoder.ended(i)) for i in ids[1:]]
    return ids[0], ids[1:]


def encode(encoder, sample, odd=None, index=0):
    """[(ids, mask)] of the chosen and the rejected answer, empty where there is none."""
    prompt, found = tokens(encoder, sample, odd, index)
    n = min(common(prompt, ids) for ids in found)
    out = []
    for answer in sample.answers:
        ids = np.zeros(0, np.uint32) if answer is None else found.pop(0)
        mask = np.arange(len(ids)) >= max(n, 1)  # nothing predicts the first token
        out.append((ids, mask))
    return out


def pack(at_rows, encoded, places, odd, rendered):
    """Joins the items of a chunk, without those of equal answers and those without a trained token."""
    kept, at, untrained, equal = [], [], [], []
    for place, item in zip(at_rows, encoded):
        if item is None:
            untrained.append(place)
        elif len(item[0][0]) and np.array_equal(item[0][0], item[1][0]):
            equal.append(place)
        elif any(len(ids) and not mask.any() for ids, mask in item):
            untrained.append(place)
        else:
            kept += item
            at += [place, place]
    ids = np.concatenate([i for i, _ in kept]) if kept else np.zeros(0, np.uint32)
    masks = np.concatenate([m for _, m in kept]) if kept else np.zeros(0, bool)
    lengths = np.array([len(i) for i, _ in kept], dtype=np.int64)
    return ids, np.packbits(masks), lengths, np.array(at, dtype=np.int64), places, {
        "untrained": untrained, "equal": equal, "trained": int(np.count_nonzero(masks)), "odd": odd,
        "rendered": rendered}
