# SPDX-License-Identifier: Apache-2.0
"""The assistant's part is found in templates of many builds: which text is trained, by the library of the data helper."""
import gzip
import os
import sys
import tempfile

import data_env

data_env.enter("jinja2")
import jinja2

ROOT = data_env.ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from megatrain_data import template as T
from megatrain_data.errors import DataError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|end▁of▁sentence|>", "<|call|>"]
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "U2"}, {"role": "assistant", "content": "A2"}]

TEMPLATES = {
    # the system's words go into the first question; nothing is prompted; blanks around the answer
    "llama 2": ("{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
                "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}{% for message in loop_messages %}"
                "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}"
                "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}", [" A1 </s>", " A2 </s>"]),
    # the header is printed with the question
    "header after the question": ("{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content + '<A>' }}{% elif m.role == 'assistant' %}"
                                   "{{ m.content + '<|end▁of▁sentence|>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
                                   ["A1<|end▁of▁sentence|>", "A2<|end▁of▁sentence|>"]),
    # the prompt opens the thinking, which history does not have
    "thinking in the prompt": ("{% for m in messages %}{{ '<' + m.role + '>' + m.content + ('</s>' if m.role == 'assistant' else '') }}{% endfor %}"
                               "{% if add_generation_prompt %}{{ '<assistant><think>\\n' }}{% endif %}", ["A1</s>", "A2</s>"]),
    # the end of the answer is printed with what follows
    "end with the next turn": ("{% for m in messages %}{% if m.role == 'user' %}{{ ('</s>' if not loop.first and messages[loop.index0-1].role == 'assistant' else '')"
                               " + '<U>' + m.content }}{% elif m.role == 'assistant' %}{{ '<A>' + m.content }}{% endif %}{% endfor %}{{ '</s>' }}"
                               "{% if add_generation_prompt %}{{ '<A>' }}{% endif %}", ["A1</s>", "A2</s>"]),
    "a macro for a message": ("{% macro turn(m) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
                              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ["A1<|im_end|>", "A2<|im_end|>"]),
    "a macro for all messages": ("{% macro all(ms) %}{% for m in ms %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% endmacro %}{{ all(messages) }}"
                                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ["A1<|im_end|>", "A2<|im_end|>"]),
    "captured in a variable": ("{% set x %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% endset %}{{ x | trim }}\n"
                               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ["A1<|im_end|>", "A2<|im_end|>"]),
    "two loops": ("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}\n{% for m in messages if m.role != 'system' %}"
                  "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
                  ["A1<|im_end|>", "A2<|im_end|>"]),
    "enumerated": ("{% for i, m in [[0, messages[0]], [1, messages[1]], [2, messages[2]], [3, messages[3]]] + ([[4, messages[4]]] if messages|length > 4 else []) %}"
                   "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
                   None),  # cannot render two turns alone: said so
    "parts of a content": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in [m.content] %}{{ c }}{% endfor %}<|im_end|>\n{% endfor %}"
                           "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ["A1<|im_end|>", "A2<|im_end|>"]),
    # what is no prompt ends with a token instead (Phi-3)
    "an end for the prompt's header": ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
                                       "{{ '<|assistant|>' if add_generation_prompt else eos_token }}", ["A1<|im_end|>", "A2<|im_end|>"]),
    "a prompt always": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}",
                        ["A1<|im_end|>", "A2<|im_end|>"]),
    # the answer ends, and then the turn (Command R7B)
    "two ends": ("{% for m in messages %}{{ '<' + m.role + '>' + m.content + ('<|im_end|>' if m.role == 'assistant' else '') + eos_token }}{% endfor %}"
                 "{{ '<assistant>' if add_generation_prompt else '' }}", ["A1<|im_end|></s>", "A2<|im_end|></s>"]),
    "marked": ("{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }}"
               "{% endif %}\n{% endfor %}", ["A1;", "A2;"]),
}


def trained(template, messages=CHAT, flags=None, train_on="assistant"):
    r = template.render(messages)
    return [r.text[a:b] for a, b in template.spans(r, messages, flags or [None] * len(messages), train_on)]


def plain(source):
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return env.from_string(source).render(messages=CHAT, tools=None, add_generation_prompt=False, **SPECIAL)


def harmony_says_the_date_and_forgets_thoughts():
    """gpt-oss: thoughts after the last question alone; calls, answers and the last answer end in three ways."""
    with open(os.path.join(ROOT, "tests", "data", "templates", "harmony.jinja"), encoding="utf-8") as f:
        t = T.ChatTemplate(f.read(), {}, ["<|end|>", "<|return|>", "<|call|>", "<|start|>"], "harmony", "2025-09-14")
    call = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    asked = {"role": "assistant", "thinking": "T1", "content": "", "tool_calls": [call]}
    tool, user = {"role": "tool", "content": "hot"}, {"role": "user", "content": "U"}
    messages = [user, asked, tool, {"role": "assistant", "thinking": "T2", "content": "A1"}, user,
                {"role": "assistant", "thinking": "T3", "content": "A2"}]
    final = "<|channel|>final<|message|>"
    assert trained(t, messages) == [
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>', final + "A1<|end|>",
        "<|channel|>analysis<|message|>T3<|end|><|start|>assistant" + final + "A2<|return|>"], trained(t, messages)
    assert trained(t, messages[:2])[0].startswith("<|channel|>analysis<|message|>T1<|end|>")
    assert "Current date: 2025-09-14" in t.render(messages).text
    assert t.render(messages[:5], generation_prompt=True).text.endswith("<|message|>U<|end|><|start|>assistant")


def a_turn_may_end_with_the_header_of_the_next():
    """GLM-4.5: the model writes the next header, whoever's it is; thinking is kept after the last question alone."""
    with open(os.path.join(ROOT, "tests", "data", "templates", "glm4.jinja"), encoding="utf-8") as f:
        t = T.ChatTemplate(f.read(), {}, ["<|user|>", "<|observation|>", "<|assistant|>", "<|endoftext|>"], "glm4")
    call = {"function": {"name": "weather", "arguments": {"city": "Ulm", "days": 2}}}
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "<think>T</think>\nA1"},
                {"role": "user", "content": "U"}, {"role": "assistant", "reasoning_content": "T", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "hot"}, {"role": "assistant", "content": "A2"}]
    got = trained(t, messages)
    assert got[0] == "\n<think></think>\nA1<|user|>" and got[2] == "\n<think></think>\nA2", got
    assert got[1].startswith("\n<think>T</think>\n<tool_call>weather\n<arg_key>city") and got[1].endswith("</tool_call><|observation|>"), got


def the_last_answer_may_be_printed_behind_the_loop():
    """Nemotron Nano 2, whose last answer the template takes out of the messages."""
    t = T.ChatTemplate("{% for m in (messages if add_generation_prompt else messages[:-1]) %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
                       "<assistant><think>{% if not add_generation_prompt %}{{ messages[-1].content }}</s>{% endif %}", SPECIAL, ENDS, "nano")
    assert t.render(CHAT[1:]).text == "<user>U1</s><assistant>A1</s><user>U2</s><assistant><think>A2</s>"
    assert trained(t, CHAT[1:]) == ["A1</s>", "A2</s>"], trained(t, CHAT[1:])


def an_answer_may_begin_otherwise_than_a_prompt():
    """Hy3: a prompt says that there are no thoughts; results of tools end with what follows."""
    t = T.ChatTemplate("{% for m in messages %}{{ '</results_of_all_the_tools>' if m.role == 'assistant' and messages[loop.index0 - 1].role == 'tool' else '' }}"
                       "<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>{% endfor %}"
                       "{{ '<|assistant|><think></think>' if add_generation_prompt else '' }}", SPECIAL, [*ENDS, "<|assistant|>", "<think>"], "hy3")
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "C"}, {"role": "tool", "content": "R"},
                {"role": "assistant", "content": "A"}, {"role": "user", "content": "U"}, {"role": "assistant", "reasoning_content": "T", "content": "A"}]
    assert trained(t, messages) == ["C</s>", "A</s>", "T</think>A</s>"], trained(t, messages)


def a_call_and_its_result_may_share_a_turn():
    """Gemma 4: the results of tools are printed with the call, by a loop within that over messages, and are not trained."""
    t = T.ChatTemplate("{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% for k in range(loop.index0 + 1, messages|length) %}"
                       "{% if messages[k].role == 'tool' and m.tool_calls %}{% set follow = messages[k] %}[{{ follow.content }}]{% endif %}{% endfor %}"
                       "{% if not m.tool_calls %}<|im_end|>{% endif %}{% endif %}{% endfor %}", {}, ["<|im_end|>"], "gemma4")
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "C", "tool_calls": [1]},
                {"role": "tool", "content": "R"}, {"role": "assistant", "content": "A"}]
    assert t.render(messages).text == "<user>U<|im_end|><assistant>C[R]<assistant>A<|im_end|>"
    assert trained(t, messages) == ["C", "A<|im_end|>"], trained(t, messages)


for name, (source, want) in TEMPLATES.items():
    t = T.ChatTemplate(source, SPECIAL, ENDS, name)
    if want is None:
        try:
            trained(t)
        except DataError as e:
            assert "{% generation %}" in str(e), e
        else:
            raise AssertionError(name)
        continue
    got = trained(t)
    assert got == want, (name, got, t.markers())
    assert trained(t, train_on="last") == want[1:], name
    assert trained(t, flags=[None, None, False, None, None]) == want[1:], name
    if name != "marked":
        assert t.render(CHAT).text == plain(source), name
    if not t.generation:
        assert "".join(trained(t, train_on="all")) == t.render(CHAT).text
    print("ok", name)

for source in ("{{ messages.__class__.__mro__ }}", "{{ messages[0].__class__ }}", "{% set ns = namespace(_x=1) %}", "{{ messages.append(1) }}", "{{ dict.__class__ }}{{ dict.fromkeys.__globals__ }}"):
    try:  # refused, or nothing comes of it
        assert T.ChatTemplate(source, {}, [], "it").render(CHAT).text == "", source
    except jinja2.exceptions.SecurityError:
        pass
print("ok the sandbox holds")
harmony_says_the_date_and_forgets_thoughts()
a_turn_may_end_with_the_header_of_the_next()
the_last_answer_may_be_printed_behind_the_loop()
an_answer_may_begin_otherwise_than_a_prompt()
a_call_and_its_result_may_share_a_turn()


# --- templates and data of strangers: limits of time and memory, and names that data may not take

from megatrain_data import limits, sources  # noqa: E402

limits.CPU_SECONDS, limits.MEMORY, limits.LINE = 1, 64 << 20, 1 << 20
for source in ("{% for i in range(99999) %}{% for k in range(99999) %}{% set x = i * k %}{% endfor %}{% endfor %}",
               "{% set ns = namespace(s='x' * 1000000) %}{% for i in range(20) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
               "{{ 'x' * 8000000000 }}", "{{ 'x' | center(8000000000) }}", "{{ [1] | tojson(indent=2000000000) }}",
               "{% for m in messages %}{{ m.content * 8000000000 }}{% endfor %}"):
    try:  # by what it does when it is compiled, when it is tried, and when it is used
        t = T.ChatTemplate(source, {}, [], "a stranger's template")
        try:
            t.markers()
        except DataError as e:
            assert "takes more than" in str(e) or "cannot render" in str(e), e
        else:
            raise AssertionError(source)
        with limits.bounded(t.name):
            t.render(CHAT)
    except DataError as e:
        assert "stranger's template takes more than" in str(e), e
    else:
        raise AssertionError(source)
assert not limits._bounded
print("ok templates are ended at limits of time and memory")

t = T.ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ range(2) | list }}{{ nice }}", {}, [], "it")
assert t.render(CHAT, variables={"nice": 1, "messages": []}).text.endswith("1]1")
for name in ("range", "namespace", "dict", "raise_exception", "_mt_enter", "_mt_tracker"):
    try:
        t.render(CHAT, variables={name: 1})
    except jinja2.exceptions.TemplateError as e:
        assert name in str(e), e
    else:
        raise AssertionError(name)
print("ok data set no function of a template")

with tempfile.TemporaryDirectory() as tmp:
    path = os.path.join(tmp, "bomb.jsonl.gz")
    with gzip.open(path, "wb") as f:
        f.write(b'{"text": "' + b"x" * (8 << 20) + b'"}\n')
    for path in (path, os.path.join(tmp, "bomb.json")):
        if path.endswith(".json"):
            open(path, "w").write('["' + "x" * (8 << 20) + '"]')
        try:
            list(sources.chunks(path))
        except DataError as e:
            assert "of more than 1 MiB" in str(e), e
        else:
            raise AssertionError(path)
print("ok a line that unpacks without end is refused")
