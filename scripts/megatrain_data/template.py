# SPDX-License-Identifier: Apache-2.0
"""Chat templates: rendered as transformers renders them, and which characters come from which message.

A conversation is rendered once. Calls that are added to the template's syntax tree record where in the output each pass
of a loop over the messages begins and ends; they print nothing. So it is known, without looking at the text, which part
belongs to which message. In what other templates print, the headers and ends of the assistant's turns are searched for
instead. If a template marks `{% generation %}`, that decides.
"""
import json
import os
import re
from collections import namedtuple
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import limits
from .errors import DataError, read_json

BUILT_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
PUSH, ENTER, LEAVE = "_mt_push", "_mt_enter", "_mt_leave"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
WORD = re.compile(r"\w+")
OF_CONVERSATIONS = ("messages", "tools", "documents", "add_generation_prompt")

#: text; regions: [(start, end, index of the message)]; generated: [(start, end)] of {% generation %} blocks
Rendering = namedtuple("Rendering", "text regions generated")


class Tracker:
    """Records which part of the output comes from which message, during a rendering."""

    def __init__(self):
        self.begin({})

    def begin(self, index_of):
        self.at, self.index_of, self.current, self.since, self.outer = 0, index_of, None, 0, []
        self.regions, self.generated = [], []

    def switch(self, index):
        if self.current is not None and self.at > self.since:
            self.regions.append((self.since, self.at, self.current))
        self.current, self.since = index, self.at

    def push(self):
        """Before a loop."""
        self.outer.append(self.current)
        return ""

    def enter(self, value):
        index = self.index_of.get(id(value))
        if index is not None:
            self.switch(index)
        return ""

    def leave(self):
        """After a loop: what follows belongs to the same message as what was before the loop."""
        self.switch(self.outer.pop())
        return ""


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what the model writes, in templates that say so."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

    def _generated(self, caller):
        text = caller()
        tracker = self.environment.globals["_mt_tracker"]
        tracker.generated.append((tracker.at, tracker.at + len(text)))
        return text


class TemplateDict:
    """dict() for templates, without the attributes of a class."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(jinja2.utils.Namespace):
    """namespace() for templates, which may not store names that begin with an underscore."""

    def __init__(*args, **kwargs):
        self, rest = args[0], args[1:]
        attrs = dict(*rest, **kwargs)
        for name in attrs:
            TemplateNamespace.check(name)
        jinja2.utils.Namespace.__init__(self, attrs)

    def __setitem__(self, name, value):
        TemplateNamespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, faster at what templates do most: reading keys of dictionaries by a dot."""

    OF_DICT = frozenset(dir(dict))

    def getattr(self, obj, attribute):
        if type(obj) is dict and attribute not in self.OF_DICT:  # not an attribute, so Jinja would end at the key
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def call(function, name, line):
    args = [nodes.Name(name, "load")] if name else []
    node = nodes.Output([nodes.Call(nodes.Name(function, "load"), args, [], None, None)])
    return node.set_lineno(line)


def instrument(body, depth=0):
    """Adds the calls to all loops whose output is printed directly, not captured. What a loop within a loop gives a name may be a later
    message, whose words it prints: the answer of a tool, in the turn of the call (Gemma 4)."""
    done = []
    for node in body:
        if isinstance(node, nodes.For) and not node.recursive:
            names = [n.name for n in node.target.find_all(nodes.Name)]
            names = [node.target.name] if isinstance(node.target, nodes.Name) else names
            node.body = [call(ENTER, n, node.lineno) for n in names] + instrument(node.body, depth + 1)
            done += [call(PUSH, None, node.lineno), node, call(LEAVE, None, node.lineno)]
            continue
        if isinstance(node, nodes.If):
            node.body, node.else_ = instrument(node.body, depth), instrument(node.else_, depth)
            node.elif_ = instrument(node.elif_, depth)
        elif isinstance(node, (nodes.With, nodes.Scope)):
            node.body = instrument(node.body, depth)
        done.append(node)
        if depth > 1 and isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            done.append(call(ENTER, node.target.name, node.lineno))
    return done


def common_prefix(a, b):
    return os.path.commonprefix([a, b])


class ChatTemplate:
    """A template with the tokenizer's special tokens. `ends`: tokens that may end a turn (all special ones)."""

    def __init__(self, source, special_tokens, ends, name="the chat template", date=None):
        self.name, self.special, self.ends = name, special_tokens, [e for e in ends if e]
        self.generation = bool(GENERATION.search(source))
        self.tracker = Tracker()
        env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        env.filters["tojson"] = to_json
        now = lambda: datetime.strptime(date, "%Y-%m-%d") if date else datetime.now()
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda f: now().strftime(f),
                           dict=TemplateDict(), namespace=TemplateNamespace, _mt_tracker=self.tracker,
                           **{PUSH: self.tracker.push, ENTER: self.tracker.enter, LEAVE: self.tracker.leave})
        try:
            with limits.bounded(name):  # Jinja computes constant expressions when it compiles
                tree = env.parse(source)
                self.bare = bare_names(tree) - set(env.globals) - set(OF_CONVERSATIONS)
                tree.body = instrument(tree.body)
                self.compiled = env.from_string(tree)
        except jinja2.exceptions.TemplateSyntaxError as e:
            raise DataError(f"{name}, line {e.lineno}: {e.message}") from None
        except (RecursionError, SyntaxError, ValueError, OverflowError) as e:  # too deep, or a constant that cannot be
            raise DataError(f"{name} cannot be compiled: {e}") from None
        self.dated = "strftime_now" in source
        self.words = frozenset(WORD.findall(source))
        self._prints = {}
        self._markers = None
        self._ended_by_next = False  # an answer ends with the header of the next message

    def render(self, messages, tools=None, generation_prompt=False, variables=None):
        """Raises jinja2.exceptions.TemplateError (and what the template's own expressions raise)."""
        own = [n for n in variables or {} if n.startswith("_") or n in self.compiled.environment.globals]
        if own:
            raise jinja2.exceptions.TemplateError(f'"chat_template_kwargs" may not set {own[0]!r}, which templates call')
        t = self.tracker
        t.begin({id(m): i for i, m in enumerate(messages)})
        given = {**self.special, "documents": None, **(variables or {}), "messages": messages, "tools": tools,
                 "add_generation_prompt": generation_prompt}
        pieces = []
        for piece in self.compiled.generate(**given):
            pieces.append(piece)
            t.at += len(piece)
        t.switch(None)
        return Rendering("".join(pieces), t.regions, t.generated)

    def prints(self, kind):
        """Whether the template prints what messages have besides their content: calls, tools, thoughts (reasoning_content), inline (in
        <think>), in a conversation as simple as can be. None: it cannot be asked."""
        if kind not in self._prints:
            with limits.bounded(self.name):
                self._prints[kind] = self._ask(kind)
        return self._prints[kind]

    def _ask(self, kind):
        word, user, end = "q7X" + kind, {"role": "user", "content": "q7Xquestion"}, {"role": "assistant", "content": "q7Xanswer"}
        function = {"name": word, "description": word, "parameters": {"type": "object", "properties": {}}}
        calls = [{"type": "function", "id": "q7Xid0000", "function": {"name": word, "arguments": {"a": "b"}}}]
        result = {"role": "tool", "name": word + "s", "tool_call_id": "q7Xid0000", "content": "q7Xresult"}
        if kind == "calls":
            asked = [{"role": "assistant", **content, "tool_calls": calls} for content in ({"content": ""}, {}, {"content": "q7Xsaid"})]
            tries = [([user, m], None, {}) for m in asked] + [([user, m, dict(result, name="q7Xtool"), end], None, {}) for m in asked]
        elif kind == "tools":
            tries = [([user, end], [{"type": "function", "function": function}], {})]
        else:
            thinks = {"content": f"<think>\n{word}\n</think>\n\nq7Xanswer"} if kind == "inline" else {"thinking": word, "reasoning_content": word}
            tries = [([user, {**end, **thinks}], None, v) for v in ({}, {"enable_thinking": True}, {"thinking": True})]
        said = []
        for messages, tools, variables in tries:
            try:
                said.append(word in self.render([dict(m) for m in messages], tools, variables=variables).text)
            except Exception:
                pass
        return any(said) if said else None

    def reads(self, name):
        """Whether a name is a word of the template's source: what it does not name it does not print."""
        return name in self.words

    def markers(self):
        """(headers, end): what the template prints before the assistant's words, longest first, and after them.

        Found once, from two small conversations; `end` is "" if nothing marks the end of a turn."""
        if self._markers is None:
            self._markers = self._learn()
        return self._markers

    def _learn(self):
        with limits.bounded(self.name):
            return self._learn_within()

    def _learn_within(self):
        asked, answered = "q7Xquestion", "q7Xanswer"
        turn = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        try:
            two, regions, _ = self.render([dict(m) for m in turn + turn])
            before = self.render(turn[:1]).text
            prompt = self.render(turn[:1], generation_prompt=True).text
        except Exception as e:
            raise DataError(f"{self.name} cannot render a simple conversation, so that the assistant's part "
                            f"cannot be found: {e}; mark it with {{% generation %}}") from None
        if not prompt.startswith(before):  # what is no prompt ends with a token instead (Phi-3)
            shorter = [before[:-len(e)] for e in self.ends if before.endswith(e)]
            before = next((b for b in shorter if prompt.startswith(b)), before)
        at = [m.end() for m in re.finditer(asked, two)], [m.start() for m in re.finditer(answered, two)]
        if len(at[0]) != 2 or len(at[1]) != 2:
            raise DataError(f"{self.name} does not print the turns of a conversation as they are; mark the "
                            "assistant's part with {% generation %}")
        shown = prompt[len(before):] if prompt.startswith(before) else ""
        gaps = [two[q:a] for q, a in zip(*at)]  # from a question to its answer
        after = two[at[1][0] + len(answered):at[0][1] - len(asked)], two[at[1][1] + len(answered):]
        heads = set()
        for k, gap in enumerate(gaps):
            if shown:  # the part of the prompt that is there
                own = [common_prefix(shown, gap[n:]) for n in range(len(gap))]
                heads.add(max(own, key=len, default=""))
            else:  # no prompt: the header is what follows the end of the question
                tail = before[before.rfind(asked) + len(asked):]
                own = next((s - at[0][k] for s, _, i in regions if i == 2 * k + 1 and at[0][k] <= s <= at[1][k]), None)
                if own is not None:  # the prompt may be there always (the first of Llama 3)
                    head = common_prefix(gap[own:], tail[own:]) or gap[own:]
                else:
                    head = gap[len(tail):] if gap.startswith(tail) else gap
                heads.add(head if head.strip() else "")
        heads.add(shown)
        # the first special token after the answer ends the turn
        places = [(after[0].find(e), -len(e), e) for e in self.ends if e in after[0]]
        end = ""
        if places:
            at_, _, token = min(places)
            end = after[0][:at_ + len(token)]
            eos = self.special.get("eos_token") or ""
            end += eos if after[0].startswith(end + eos) else ""  # the answer's end, and the turn's (Command R7B)
            if after[1] and not after[1].startswith(end):
                end = ""  # the last turn ends differently: decide for each region
        self._ended_by_next = bool(places) and not after[1] and after[0].startswith(end)
        if not places and after[1]:
            end = common_prefix(*after).rstrip("\n ")
        return sorted((h for h in heads if h), key=len, reverse=True), end

    def _trim(self, text, start, end):
        """Removes the header of a region of an assistant's message, and what follows its end."""
        heads, eot = self.markers()
        region = text[start:end]
        for h in heads:
            at = region.find(h, 0, len(h) + 64)  # behind the end of a tool's results (Hy3)
            if at >= 0:
                start += at + len(h)
                break
        else:  # it goes on otherwise than a prompt does, as with thoughts: the tokens that they share
            shared = max((common_prefix(h, region) for h in heads), key=len, default="")
            start += max((shared.rfind(e) + len(e) for e in self.ends if e in shared), default=0)
        if eot:
            at = text.rfind(eot, start, end)
            if at >= 0:
                return start, at + len(eot)
            at = text.find(eot, end, end + len(eot) + 2)  # printed with the next message
            if at >= 0 and not text[end:at].strip():
                return start, at + len(eot)
        for e in self.ends:  # it ends with another token than usual
            if self._ended_by_next and text.startswith(e, end):
                return start, end + len(e)
            at = text.rfind(e, start, end)
            if at >= 0 and not text[at + len(e):end].strip():
                return start, at + len(e)
        return start, end

    def _search(self, text, messages):
        """Finds the assistant's messages by their markers, for templates without a loop over messages."""
        heads, eot = self.markers()
        if not heads or not eot:
            raise DataError(f"{self.name}: the assistant's turns cannot be found in what it prints; mark them "
                            "with {% generation %}")
        spans, at = {}, 0
        for i, m in enumerate(messages):
            words = m.get("content")
            words = words.strip() if isinstance(words, str) else ""
            if m["role"] != "assistant":
                here = text.find(words, at) if words else -1
                at = here + len(words) if here >= 0 else at
                continue
            found = [(text.find(h, at), -len(h)) for h in heads if text.find(h, at) >= 0]
            if not found:
                raise DataError(f"{self.name}: message {i} is not in what it prints")
            start = min(found)[0] - min(found)[1]
            inside = text.find(words, start) if words else start
            end = text.find(eot, inside + len(words) if inside >= 0 else start)
            at = end + len(eot) if end >= 0 else len(text)
            spans[i] = [(start, at)]
        return spans

    def spans(self, rendering, messages, flags, train_on):
        """[(start, end)] of the characters to train, ascending. `flags`: True, False or None for each message."""
        if train_on == "all" and all(f is not False for f in flags):
            return [(0, len(rendering.text))]
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        want = set(assistants if train_on != "last" else assistants[-1:])
        if train_on == "all":
            want = set(range(len(messages)))
        want = {i for i in want if flags[i] is not False} | {i for i, f in enumerate(flags) if f}
        merged = []
        for s, e, i in rendering.regions:
            if merged and merged[-1][2] == i and merged[-1][1] == s:
                merged[-1] = (merged[-1][0], e, i)
            else:
                merged.append((s, e, i))
        seen = {i for _, _, i in merged}
        if self.generation:
            return self._generated(rendering, merged, assistants, want)
        found = {}
        if any(i in seen for i in assistants):
            for s, e, i in merged:
                found.setdefault(i, []).append(self._trim(rendering.text, s, e) if i in set(assistants) else (s, e))
            # the last answer may be printed behind the loop (Nemotron Nano 2)
            behind = {i for i in set(assistants) - seen if (str(messages[i].get("content") or "").strip() or "\0") in rendering.text}
            if behind:
                found.update({i: f for i, f in self._search(rendering.text, messages).items() if i in behind})
        elif assistants:
            found = self._search(rendering.text, messages)
        return sorted(span for i in want for span in found.get(i, []) if span[1] > span[0])

    def _generated(self, rendering, regions, assistants, want):
        if want == set(assistants):
            return rendering.generated
        kept = []
        for k, (s, e) in enumerate(rendering.generated):
            owner = next((i for a, b, i in regions if a <= s < b), None)
            if owner is None and len(rendering.generated) == len(assistants):
                owner = assistants[k]
            if owner is None:
                raise DataError(f"{self.name}: which message a {{% generation %}} block belongs to is not to be seen, "
                                "and some messages are not to be trained")
            if owner in want:
                kept.append((s, e))
        return kept


def bare_names(tree):
    """Names that a template prints alone, {{ name }}, gives no value itself, and never asks for."""
    printed = {n.name for o in tree.find_all(nodes.Output) for n in o.nodes if isinstance(n, nodes.Name)}
    asked = {n.name for i in tree.find_all((nodes.If, nodes.CondExpr)) for n in (i.test, *i.test.find_all(nodes.Name))
             if isinstance(n, nodes.Name)}
    return (printed & jinja2.meta.find_undeclared_variables(tree)) - asked if printed else set()


def has(words, text):
    return words in text or to_json(words)[1:-1] in text or json.dumps(words)[1:-1] in text


def leaves(value):
    """The keys and values in an object of JSON, as text."""
    todo = [value]
    while todo:
        v = todo.pop()
        if isinstance(v, dict):
            todo += [*v, *v.values()]
        elif isinstance(v, list):
            todo += v
        elif v is not None and v != "":
            yield v if isinstance(v, str) else to_json(v)


def lost_content(text, messages):
    """Of the first message whose content is not in the text: its index.

    Templates leave out the thoughts of earlier answers, strip white space and write tools' answers as JSON."""
    for i, m in enumerate(messages):
        words = m.get("content")
        if isinstance(words, dict):
            words = next((v for v in words.values() if isinstance(v, str)), "")
        if m["role"] == "assistant" and isinstance(words, str):
            words = words.rpartition("</think>")[2]
        words = words.strip() if isinstance(words, str) else ""
        if words and not has(words, text):
            return i
    return None


def thoughts_of(message):
    """(kind, words) of what an answer thinks before it speaks; None: it says none."""
    given, words = message.get("reasoning_content"), message.get("content")
    if isinstance(given, str) and given.strip():
        return "thoughts", given.strip()
    if isinstance(words, str) and "</think>" in words:
        inside = words.rpartition("</think>")[0].rpartition("<think>")[2].strip()
        return ("inline", inside) if inside else None
    return None


def lost_calls(t, parts, messages):
    for i, m in enumerate(messages):
        for call in m.get("tool_calls") or []:
            function = call.get("function", call)
            name, given = function["name"], list(leaves(function["arguments"]))
            if t.prints("calls") is False or not has(name, parts(i)):
                return f'the call of "{name}" in message {i} (tool_calls)'
            if given and not any(has(v, parts(i)) for v in given):
                return f'what the call of "{name}" in message {i} is given (arguments)'
    return None


def lost_tools(t, text, tools):
    for tool in tools or []:
        inner = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        if isinstance(inner.get("name"), str) and (t.prints("tools") is False or not has(inner["name"], text)):
            return f'the tool "{inner["name"]}" (tools)'
    return None


def lost(t, rendering, messages, tools):
    """{kind: text} of what the template made nothing of: what is not in the text, or not in the part of its message."""
    text, found = rendering.text, {}

    def parts(i):
        mine = [text[s:e] for s, e, k in rendering.regions if k == i]
        return "".join(mine) if mine else text

    at = lost_content(text, messages)
    if at is not None:
        found["unprinted"] = f'what message {at} (role "{messages[at]["role"]}") says'
    found["calls"], found["tools"] = lost_calls(t, parts, messages), lost_tools(t, text, tools)
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        kind, words = (thoughts_of(m) if m["role"] == "assistant" else None) or (None, "")
        if kind and t.prints(kind) is False:
            found.setdefault("thoughts", f"what message {i} thinks ({'reasoning_content' if kind == 'thoughts' else '<think>'})")
        elif kind and not has(words, parts(i)):
            found.setdefault("dropped" if i < last else "thoughts", f"what message {i} thinks")
    where = "is not in the text that the chat template makes of it"
    return {k: f"{v} {where}" if k != "dropped" else f"the chat template leaves out {v}, as an answer before a later question"
            for k, v in found.items() if v}


def specials_in(messages, special):
    """(message, token) of the first message that writes a special token out, or None. `special`: a pattern of all of them."""
    for i, m in enumerate(messages):
        found = special.search(m["content"]) if isinstance(m.get("content"), str) else None
        if found:
            return i, found[0]
    return None


def built_in_names():
    return sorted(n[:-6] for n in os.listdir(BUILT_IN) if n.endswith(".jinja"))


def read(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read {path}: {e}") from None


def of_model(model_dir, config):
    """{name: source} of the model's own templates: files win over tokenizer_config.json."""
    found = {}
    path = os.path.join(model_dir, "chat_template.jinja")
    if os.path.exists(path):
        found["default"] = read(path)
    more = os.path.join(model_dir, "additional_chat_templates")
    for n in sorted(os.listdir(more)) if os.path.isdir(more) else []:
        if n.endswith(".jinja"):
            found[n[:-6]] = read(os.path.join(more, n))
    own = config.get("chat_template")
    if not found and isinstance(own, str):
        found["default"] = own
    elif not found and isinstance(own, list):
        found = {t["name"]: t["template"] for t in own if isinstance(t, dict) and "name" in t and "template" in t}
    path = os.path.join(model_dir, "chat_template.json")  # of older processors
    if not found and os.path.exists(path):
        own = read_json(path).get("chat_template")
        found = {"default": own} if isinstance(own, str) else {}
    return found


def sources(which, model_dir, config):
    """{name: source}: "default" and perhaps "tool_use". `which`: "model", a built-in name, or a file."""
    if which == "model":
        found = of_model(model_dir, config) if model_dir else {}
        if "default" not in found and "tool_use" not in found:
            raise DataError(f"{model_dir or 'the byte tokenizer'} has no chat template: set data.template (of sample: "
                            f"--template) to a file, or to "
                            f"one of {', '.join(built_in_names())}", "usage")
        return {k: (v, f"the chat template of {model_dir}") for k, v in found.items()}
    if which in built_in_names():
        return {"default": (read(os.path.join(BUILT_IN, which + ".jinja")), f'the built-in template "{which}"')}
    if not os.path.isfile(which):
        raise DataError(f'data.template = {which}: no such file, and not one of {", ".join(built_in_names())}', "usage")
    return {"default": (read(which), which)}
