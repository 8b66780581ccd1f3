# SPDX-License-Identifier: Apache-2.0
"""Converts records of all data formats to one of five kinds of sample.

    Chat   messages (dicts with "role"), tools, further template variables, a train flag for each message, and fields of the
           record that have a meaning elsewhere and none here
    Text   a string, all of it trained
    Pair   a prompt and a completion as strings, the completion trained
    Ids    token ids and labels
    Request  a context and a continuation, of which the log-probability is asked for
"""
import json
from collections import namedtuple

from .errors import parse_json

Chat = namedtuple("Chat", "messages tools variables flags fields")
Text = namedtuple("Text", "text")
Pair = namedtuple("Pair", "prompt completion")
Ids = namedtuple("Ids", "ids labels")
Request = namedtuple("Request", "context continuation")

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "function_call",
}
CHATS = [("messages", "messages"), ("conversations", "sharegpt"), ("instruction", "alpaca")]
BY_KEY = [*CHATS, ("input_ids", "input_ids"), ("prompt", "prompt_completion"), ("text", "text")]
MARKS = ("train", "weight", "loss", "trainable", "loss_mask", "training")  # what a message says about being trained
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of the same
MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # as src/data/samples.c
# fields of a record that other programs train on or by
FIELDS = ("system", "functions", "function_call", "image", "images", "video", "videos", "audio", "audios", *MASKS,
          "sample_weight", "loss_weight", "weight", "margin")


class Bad(Exception):
    """What is wrong with a record."""


def detect(record):
    if "token_ids" in record or "advantage" in record or ("reward" in record and "group" in record):
        return "rollouts"
    if "rejected" in record:
        return "preference"
    if "label" in record and ("completion" in record or isinstance(record["label"], bool) and any(k in record for k, _ in CHATS)):
        return "rated"
    if "continuation" in record or "arguments" in record:
        return "requests"
    for key, name in BY_KEY:
        if key in record:
            return name
    keys = ", ".join(f'"{k}"' for k in list(record)[:8])
    raise Bad(f"no known format has the keys {keys}: one of messages, conversations, instruction, prompt, chosen and rejected, "
              "completion and label, text, input_ids tells it; name yours by data.columns = instruction:..., output:... (turns of the "
              "chat template) or prompt:..., completion:... (text as it stands), or set data.format")


def other(record, name):
    """The format by which a record with a preference can be trained on without one, or None."""
    if name == "rated" and "completion" in record:
        return "prompt_completion" if "prompt" in record else None
    return next((f for key, f in BY_KEY[:4] if name in ("preference", "rated") and key in record), None)


def renamed(record, columns):
    """The record with the names that formats have for its fields; columns: {field: the record's name}."""
    if not columns or not isinstance(record, dict):
        return record
    found = {field: record[name] for field, name in columns.items() if name in record}
    taken = set(columns.values())
    return {**{k: v for k, v in record.items() if k not in taken}, **found}


def text_of(record, key, default=None):
    value = record.get(key, default)
    if value is None:
        value = default
    if not isinstance(value, str):
        raise Bad(f'"{key}" is missing or not a string')
    return value


def flag_of(message):
    """What a message says about being trained: True, False, or None. A number that is no mark ("loss": 2.7) is none."""
    said = {}
    for key in MARKS:
        value = message.get(key)
        if isinstance(value, bool) and key != "weight":
            said[key] = value
        elif value is not None and not isinstance(value, bool) and key != "train" and value in (0, 1):
            said[key] = bool(value)
        elif value is not None and key in ("train", "weight"):
            raise Bad(f'"{key}" of a message must be {"true or false" if key == "train" else "0 or 1"}')
    if len(set(said.values())) > 1:
        raise Bad("a message is marked to be trained and not to be: " + ", ".join(f'"{k}": {json.dumps(message[k])}' for k in said))
    return next(iter(said.values()), None)


def tools_of(value):
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = parse_json(value)
        except ValueError as e:
            raise Bad(f'"tools" is a string that is not JSON: {e}') from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
        raise Bad('"tools" must be a list of objects')
    return value


def words_of(content, index):
    """A message's content; parts of type text become one string, as templates that know parts print them."""
    if content is None or isinstance(content, (str, dict)):  # some templates print a tool's answer as JSON
        return content
    if not isinstance(content, list):
        raise Bad(f'"content" of message {index} must be a string, or a list of parts of type text')
    words = []
    for part in content:
        if isinstance(part, str):
            words.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            words.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else part
            raise Bad(f"message {index} has a part of type {json.dumps(kind)[:40]}: only parts of type text are supported")
    return "".join(words)


def turns_of(turns, name, record):
    """The list of turns of a conversation, which tables of text have as JSON."""
    if isinstance(turns, str) and turns.strip():
        try:
            turns = parse_json(turns)
        except ValueError as e:
            raise Bad(f'"{name}" is a string that is not JSON ({e}), not a list of turns') from None
    if turns is not None and not isinstance(turns, (list, str)):
        raise Bad(f'"{name}" must be a list of turns')
    if not turns:
        raise Bad("the conversation is missing or empty" + ("" if name in record else f': there is no "{name}" among the keys '
                  + ", ".join(f'"{k}"' for k in list(record)[:8])))
    return turns


def with_arguments(function):
    """A call's function whose arguments are an object, as templates want them; clients write a string of JSON, or nothing."""
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            made = parse_json(given) if given.strip() else {}
        except ValueError:
            made = None
        given = made if isinstance(made, dict) else given  # else it is what a model wrote, which need not be JSON
    return {**function, "arguments": {} if given is None else given}


def calls_of(calls, key):
    """[call] of a message's calls, which may be one alone, or JSON; the function of each has an object as its arguments."""
    try:
        calls = parse_json(calls) if isinstance(calls, str) and calls.strip() else calls or []
    except ValueError as e:
        raise Bad(f'"{key}" is a string that is not JSON: {e}') from None
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise Bad(f'"{key}": a call is an object with the "name" and "arguments" of a function')
        made.append({**call, "function": with_arguments(inner)} if inner is not call else with_arguments(call))
    return made


def with_tool_calls(messages):
    """Messages whose calls have the older form of OpenAI's API, in the form that templates know."""
    made = []
    for m in messages:
        if m.get("function_call"):
            calls = [{"type": "function", "function": c} for c in calls_of(m["function_call"], "function_call")]
            m = {**{k: v for k, v in m.items() if k != "function_call"}, "tool_calls": m.get("tool_calls", calls)}
        made.append({**m, "role": "tool"} if m["role"] == "function" else m)
    return made


def chat(messages, record, flags=None, tools="tools", name="messages", used=()):
    """Checks messages and drops their empty keys, as transformers does before it renders."""
    kept = []
    for i, m in enumerate(turns_of(messages, name, record)):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise Bad('every message must be an object with a "role"')
        m = {k: v for k, v in m.items() if v is not None}
        if "content" in m:
            m["content"] = words_of(m["content"], i)
        reasoning = next((m[k] for k in THOUGHTS if k in m), None)
        if reasoning is not None:  # these names mean the same; templates read one or the other
            m = {"thinking": reasoning, **m, "reasoning_content": reasoning}
        if "tool_calls" in m:
            m["tool_calls"] = calls_of(m["tool_calls"], "tool_calls")
            m = m if m["tool_calls"] else {k: v for k, v in m.items() if k != "tool_calls"}
        kept.append(m)
    variables = record.get("chat_template_kwargs") or {}
    if isinstance(variables, str):
        try:
            variables = parse_json(variables)
        except ValueError:
            pass
    if not isinstance(variables, dict):
        raise Bad('"chat_template_kwargs" must be an object')
    if isinstance(record.get("documents"), list) and record["documents"]:
        variables = {"documents": record["documents"], **variables}
    given = tools_of(record.get(tools))
    if "tools" in variables:
        if given is not None:
            raise Bad(f'tools are given twice, by "{tools}" and by "chat_template_kwargs"')
        variables = dict(variables)
        given = tools_of(variables.pop("tools"))
    flags = flags or [None] * len(kept)
    own = [flag_of(m) for m in kept]
    return Chat(kept, given, variables, [o if o is not None else f for o, f in zip(own, flags)], without_effect(record, used))


def without_effect(record, used=()):
    """Those of FIELDS that a record has, and that its format has no use for."""
    return tuple(f for f in FIELDS if record.get(f) not in (None, "", [], {}) and f not in used)


def function_call(text):
    """The assistant's function calls, from the JSON text in sharegpt data."""
    calls = calls_of(text, "function_call")
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def sharegpt(record, columns, tags):
    column = columns.get("messages", "conversations")
    turns = turns_of(record.get(column), column, record)
    role_tag, content_tag = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if not tags and isinstance(turns[0], dict) and "role" in turns[0]:
        return chat(turns, record, tools=columns.get("tools", "tools"), name=column)  # these are messages after all
    names = dict(SHAREGPT_ROLES)
    for tag, role in (("user_tag", "user"), ("assistant_tag", "assistant"), ("observation_tag", "tool"),
                      ("function_tag", "function_call"), ("system_tag", "system")):
        if tag in tags:
            names[tags[tag]] = role
    messages = []
    system = record.get(columns.get("system", "system"))
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for t in turns:
        if not isinstance(t, dict) or role_tag not in t:
            raise Bad(f'every turn must be an object with "{role_tag}" and "{content_tag}"')
        role = names.get(t[role_tag])
        if role is None:
            raise Bad(f'"{role_tag}" is "{t[role_tag]}": expected one of {", ".join(sorted(set(names)))}')
        content = text_of(t, content_tag)
        message = function_call(content) if role == "function_call" else {"role": role, "content": content}
        messages.append({**{k: v for k, v in t.items() if k not in (role_tag, content_tag)}, **message})
    return chat(messages, record, tools=columns.get("tools", "tools"), name=column, used=("system",))


def alpaca(record, columns):
    col = lambda name, default: columns.get(name, default)
    messages = []
    system = record.get(col("system", "system"))
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for pair in record.get(col("history", "history")) or []:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise Bad('"history" must be a list of pairs of strings')
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = [text_of(record, col("prompt", "instruction")), text_of(record, col("query", "input"), "")]
    if not columns and "output" not in record:
        raise Bad('there is an "instruction", but no "output": name yours by data.columns = output:...')
    answer = text_of(record, col("response", "output"))
    messages += [{"role": "user", "content": "\n".join(p for p in parts if p)}, {"role": "assistant", "content": answer}]
    return chat(messages, record, tools=col("tools", "tools"), name="instruction", used=("system",))


def prompt_completion(record):
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return chat(prompt + completion, record, [False] * len(prompt) + [None] * len(completion))
    if "prompt" not in record:
        raise Bad('there is no "prompt": all samples of a file have the format of the first one, or data.format')
    if "completion" not in record:
        raise Bad('there is a "prompt", but no "completion": name yours by data.columns = completion:...')
    raise Bad('"prompt" and "completion" must both be strings, or both be lists of messages')


def requests(record):
    """The loglikelihood requests of lm-evaluation-harness in a record: one ("context" and "continuation", or "arguments" of
    both), or those of a line that it writes with --log_samples ("arguments": {"gen_args_0": {"arg_0": ..., "arg_1": ...}, ...})."""
    made = record.get("arguments", [record.get("context"), record.get("continuation")])
    if isinstance(made, dict):
        made = [list(v.values()) if isinstance(v, dict) else v for v in made.values()]
    elif isinstance(made, list) and not (made and isinstance(made[0], (list, tuple))):
        made = [made]
    for pair in made:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise Bad("a loglikelihood request has two strings, a context and a continuation")
    return [Request(*pair) for pair in made]


def input_ids(record):
    ids, labels = record.get("input_ids"), record.get("labels")
    if not isinstance(ids, list) or not ids:
        raise Bad('"input_ids" is missing or empty')
    for i, v in enumerate(ids):
        if isinstance(v, bool) or not isinstance(v, int) or v < 0:
            raise Bad(f"input_ids[{i}] is not a token id")
    masks = [m for m in MASKS if record.get(m) is not None] if labels is None else []
    if masks:
        raise Bad(f'"{masks[0]}" is not read: say by "labels" what is trained, with -100 elsewhere')
    if labels is not None:
        if not isinstance(labels, list) or len(labels) != len(ids):
            raise Bad('"labels" and "input_ids" differ in length')
        for i, (v, l) in enumerate(zip(ids, labels)):
            if l not in (-100, v):
                raise Bad(f"labels[{i}] must be -100 or input_ids[{i}]")
    return Ids(*without_padding(ids, labels, record.get("attention_mask")))


def without_padding(ids, labels, mask):
    """Tokens whose attention_mask is 0 are padding: they are cut off at both ends, and refused elsewhere."""
    if mask is None:
        return ids, labels
    if not isinstance(mask, list) or len(mask) != len(ids) or any(isinstance(m, bool) or m not in (0, 1) for m in mask):
        raise Bad('"attention_mask" must hold a 0 or a 1 for each of "input_ids"')
    if 1 not in mask:
        raise Bad('"attention_mask" is 0 everywhere')
    first, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if 0 in mask[first:end]:
        raise Bad(f"attention_mask[{mask.index(0, first)}] is 0 between tokens that are not padding, which is not supported")
    return ids[first:end], labels and labels[first:end]


def convert(record, name, entry):
    """Converts a record of format `name` to a sample, or a list of them; `entry` is that of a dataset_info.json, or {}."""
    if not isinstance(record, dict):
        raise Bad("a sample must be a JSON object")
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if name == "messages":
        return chat(record.get("messages"), record)
    if name == "sharegpt":
        return sharegpt(record, columns, tags)
    if name == "alpaca":
        return alpaca(record, columns)
    if name == "prompt_completion":
        return prompt_completion(record)
    if name == "input_ids":
        return input_ids(record)
    if name == "requests":
        return requests(record)
    return Text(text_of(record, columns.get("prompt", "text") if entry else "text"))
