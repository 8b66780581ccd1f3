# SPDX-License-Identifier: Apache-2.0
"""Rollouts of text: records to a conversation, or a text, and to what is known of the whole rollout. Log-probabilities are of the
tokens that were sampled, which those that are made anew need not be: none are taken. Advantages are made by src/data/rollouts.c."""
import hashlib
import json
import math

import numpy as np

from .formats import Bad, Chat, Pair, chat

OF_TOKENS = ("logprobs", "old_logprobs", "ref_logprobs", "mask")
OWN = np.dtype([("reward", "<f4"), ("temperature", "<f4"), ("group", "<u8"), ("advantage", "<f4")])  # of a rollout


def number(record, name):
    value = record.get(name)
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 3e38:
        raise Bad(f'"{name}" of a rollout of text must be a number')
    return value


def own(record):
    """The values of OWN; the group as a hash of its name, as union mt_rollout_values has it."""
    made = {name: number(record, name) for name in ("reward", "temperature", "advantage")}
    group, cut = record.get("group"), record.get("truncated") or False
    if math.isnan(made["advantage"]) and (math.isnan(made["reward"]) or group is None):
        raise Bad('a rollout has an "advantage", or a "reward" and a "group" (which the rollouts of its prompt have in common)')
    if not isinstance(cut, bool):
        raise Bad('"truncated" must be true or false')
    name = hashlib.blake2b(json.dumps(group, sort_keys=True).encode(), digest_size=8).digest()
    of_group = (int.from_bytes(name, "little") | 256) & ~255 if math.isnan(made["advantage"]) else 0
    noise = -1 if record.get("noise") is None else number(record, "noise")
    if noise != int(noise) or not -1 <= noise <= 126:
        raise Bad('"noise" is a whole number up to 126')
    return made["reward"], made["temperature"], of_group | int(noise + 1) << 1 | cut, made["advantage"]


def turns(value, role):
    return [{"role": role, "content": value}] if isinstance(value, str) else [value] if isinstance(value, dict) else value


def sample_of(record):
    """What is trained: a text after a text, or else the assistant's turns of a completion, or of a whole conversation."""
    prompt, completion = record.get("messages", record.get("prompt")), record.get("completion", [])
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(prompt, completion)
    before, after = (turns(prompt, "user"), turns(completion, "assistant")) if "completion" in record else ([], prompt)
    if not all(isinstance(t, list) and all(isinstance(m, dict) for m in t) for t in (before, after)):
        raise Bad('a rollout of text has "messages", or a "prompt" and a "completion", each a text or messages; one of token ids has '
                  '"prompt_ids" and "completion_ids", or "token_ids" and "mask"')
    if not any(m.get("role") == "assistant" for m in after):
        raise Bad("no turn of the completion is the assistant's: the policy sampled nothing")
    return chat(before + after, record, [False] * len(before) + [m.get("role") == "assistant" for m in after])


def convert(record):
    """(Chat or Pair, values of OWN)."""
    if not isinstance(record, dict):
        raise Bad("a sample must be a JSON object")
    ids = [k for k in ("token_ids", "prompt_ids", "completion_ids") if k in record]
    if ids:
        raise Bad(f'"{ids[0]}": rollouts of token ids are read from .jsonl and .json files that begin with one: keep them apart from '
                  "those of text")
    return sample_of(record), own(record)


def without_end(encoder, sample, ids, mask):
    """Tokens and mask of a completion that was cut off: the token that ends it was not sampled."""
    is_end = encoder.is_end[np.minimum(ids, len(encoder.is_end) - 1)]
    ends = np.flatnonzero(mask & is_end)
    whole = isinstance(sample, Chat) and sample.messages[-1]["role"] != "assistant"
    n = len(ids) if whole or not len(ends) else ends[-1]
    return ids[:n], mask[:n]


def values(rollouts, lengths):
    """Four numbers of each token (union mt_rollout_values)."""
    starts = np.cumsum(lengths) - lengths
    made = np.full((int(np.sum(lengths)), 4), np.nan, dtype="<f4")
    made[:, 0] = np.repeat(rollouts["advantage"], lengths)
    made[starts, 0], made[starts, 1] = rollouts["reward"], rollouts["temperature"]
    made.view("<u8")[starts, 1] = rollouts["group"]
    return made
