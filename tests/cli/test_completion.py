# SPDX-License-Identifier: Apache-2.0
"""Completion in shells: commands, options, keys with their choices, machines and models."""
import shutil
import subprocess

from tiny import megatrain

SCRIPT = megatrain("completion", "bash").stdout
# As readline has them: = is a word of its own.
ASK = """compopt() { :; }
source /dev/stdin
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_megatrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(*words):
    p = subprocess.run(["bash", "-c", ASK, "bash", "megatrain", *words], input=SCRIPT, text=True, capture_output=True, cwd="/")
    assert not p.stderr, p.stderr
    return set(p.stdout.split())


for words, some, none in [
    (["pl"], {"plan"}, {"run", "--set"}),
    (["plan", "--mach"], {"--machine"}, {"--model"}),
    (["run", "--set", "adapter.k"], {"adapter.kind="}, {"adapter.rank=", "--set"}),
    (["run", "--set", "adapter.kind", "="], {"none", "lora", "dora"}, {"adapter.kind="}),
    (["run", "--set", "adapter.kind", "=", "l"], {"lora"}, {"none"}),
    (["run", "--set", "data.packing", "=", "o"], {"on", "off"}, set()),
    (["plan", "--machine", "rtx40"], {"rtx4080", "rtx4090"}, {"rtx3090"}),
    (["plan", "--model", "Qwen3-8"], {"Qwen3-8B"}, {"Qwen3-32B"}),
]:
    got = complete(*words)
    assert some <= got and not none & got, (words, got)
for shell, start in {"zsh": "#compdef megatrain\n", "fish": "complete -c megatrain "}.items():
    text = megatrain("completion", shell).stdout
    assert text.startswith(start) and "\0" not in text and "adapter.kind=" in text, text[:200]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
