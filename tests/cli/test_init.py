# SPDX-License-Identifier: Apache-2.0
"""config init and config explain. Each task's file, as it is printed for a small model and 300 samples, trains as it stands: as
many updates as TRL's defaults make of that data, and the held-out loss falls."""
import json
import os
import random
import re
import sys
import tempfile

import data_env

data_env.enter("tokenizers")

from families import WORDS, write_tokenizer
from tiny import config, megatrain, metrics, with_weights, write_data, write_model

N = 300
#: TRL: rows of 8 samples an update; twice as many is usual, too
MOST, LEAST = N / 8, N / 16


def question(r):
    thing = r.choice(WORDS)
    return f"What is {thing} {r.choice(WORDS)}?", f"It is {thing}, as {' '.join(r.choice(WORDS) for _ in range(r.randrange(3, 20)))}."


def turn(role, text):
    return {"role": role, "content": text}


def write(path, line, n=N):
    r = random.Random(1)
    with open(path, "w") as f:
        for _ in range(n):
            f.write(json.dumps(line(r, *question(r))) + "\n")
    return path


def files(tmp):
    chat = write(os.path.join(tmp, "chat.jsonl"), lambda r, q, a: {"messages": [turn("user", q), turn("assistant", a)]})
    pairs = write(os.path.join(tmp, "pairs.jsonl"), lambda r, q, a: {
        "prompt": [turn("user", q)], "chosen": [turn("assistant", a)], "rejected": [turn("assistant", " ".join(reversed(a.split())))]})
    text = write(os.path.join(tmp, "text.jsonl"), lambda r, q, a: {"text": q + " " + a})
    return {"dpo": pairs, "pretrain": text}, chat


def init(tmp, name, *options):
    """The path of a file that `config init` printed; it is short, and every line fits a terminal."""
    text = megatrain("-q", "config", "init", *options, cwd=tmp).stdout
    path = os.path.join(tmp, name + ".ini")
    open(path, "w").write(text)
    assert len(text.splitlines()) <= 40 and "from the file's folder" in text, (name, text)
    assert not [line for line in text.splitlines() if len(line) > 78 and tmp not in line], (name, text)
    return path


def values(path):
    return {k: v for k, v in re.findall(r"^(\w+) = (\S+)", open(path).read(), re.M)}


def each_task_trains_as_it_stands():
    others, chat = files(tmp)
    for task in ["sft", "lora", "qlora", "dpo", "pretrain", "blocks"]:
        ini = init(tmp, task, "--task", task, "--model", model, "--data", others.get(task, chat), "--set", f"checkpoint.dir=out-{task}")
        said = megatrain("run", ini, "--set", "device.kind=cpu", cwd=tmp)
        m = metrics(os.path.join(tmp, f"out-{task}"))
        steps = [x["step"] for x in m if "loss" in x]
        held = [x["eval_loss"] for x in m if "eval_loss" in x]
        an_epoch = len(steps) / float(values(ini)["epochs"])
        assert LEAST <= an_epoch <= MOST, (task, an_epoch)
        assert 60 <= len(steps) <= 120, (task, len(steps))
        assert len(held) >= 5 and held[-1] < held[0], (task, held)
        assert "warning" not in said.stderr, (task, re.findall(".*warning.*", said.stderr))
        print(f"ok {task}: {len(steps)} updates, held-out loss {held[0]:.4f} to {held[-1]:.4f}", flush=True)
    # without --task the data say what they are for
    for task, data in [("sft", chat), *others.items()]:
        assert open(init(tmp, "any", "--model", model, "--data", data)).readline() == open(os.path.join(tmp, task + ".ini")).readline()


def rows_and_steps_follow_the_data():
    n = 1000
    for longest, name in [(20, "short"), (400, "ragged")]:
        def line(r, q, a, longest=longest):
            return {"messages": [turn("user", q), turn("assistant", " ".join(r.choice(WORDS) for _ in range(
                longest if r.random() < 0.004 else r.randrange(3, 20))))]}
        data = write(os.path.join(tmp, name + ".jsonl"), line, n)
        ini = init(tmp, name, "--model", model, "--data", data)
        an_epoch = int(re.search(r"(\d+) updates an epoch", open(ini).read()).group(1))
        assert 60 <= an_epoch <= 125, (name, open(ini).read())
        said = megatrain("data", "prepare", ini)
        steps = int(re.search(r"(\d+) steps a pass", said.stdout).group(1))
        assert 0.85 * an_epoch <= steps <= 1.1 * an_epoch, (an_epoch, said.stdout)


def the_template_is_the_model_s_or_one_that_its_tokenizer_knows():
    chat = files(tmp)[1]
    assert values(init(tmp, "own", "--model", model, "--data", chat))["template"] == "model"
    plain = os.path.join(tmp, "plain")
    os.makedirs(plain)
    for name in os.listdir(model):
        if name not in ("chat_template.jinja",) and os.path.isfile(os.path.join(model, name)):
            data = open(os.path.join(model, name), "rb").read()
            if name == "tokenizer_config.json":
                data = json.dumps({k: v for k, v in json.loads(data).items() if k != "chat_template"}).encode()
            open(os.path.join(plain, name), "wb").write(data)
    ini = init(tmp, "named", "--model", plain, "--data", chat)
    assert values(ini)["template"] == "chatml", open(ini).read()
    megatrain("check", ini, "--set", "device.kind=cpu")
    with open(os.path.join(plain, "tokenizer_config.json")) as f:
        of = json.load(f)
    for name, own, want in [("tokenizer_config.json", {**of, "chat_template": None}, "chatml"),  # null is none
                            ("chat_template.json", {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "model")]:
        with open(os.path.join(plain, name), "w") as f:
            json.dump(own, f)
        assert values(init(tmp, "named", "--model", plain, "--data", chat))["template"] == want, name
    os.remove(os.path.join(plain, "tokenizer.json"))
    assert "tokenizer" not in values(init(tmp, "named", "--model", plain))  # never bytes for what was trained on other tokens
    open(os.path.join(shape, "tiktoken.model"), "w").close()
    assert "tokenizer" not in values(init(tmp, "named", "--model", shape))
    os.remove(os.path.join(shape, "tiktoken.model"))
    ini = init(tmp, "bytes", "--task", "sft", "--model", shape, "--data", chat, "--set", "model.init=random")
    assert values(ini)["tokenizer"] == "byte", open(ini).read()
    megatrain("check", ini, "--set", "device.kind=cpu")


def what_is_printed_is_of_these_data():
    """Rated answers get a loss that takes them, strings no template, few samples no share, text the model's own weights."""
    rated = write(os.path.join(tmp, "rated.jsonl"), lambda r, q, a: {"prompt": q, "completion": a, "label": len(a) % 2 == 0}, 60)
    ini = init(tmp, "rated", "--model", model, "--data", rated)
    assert values(ini)["loss"] == "kto" and "not used" in open(ini).read(), open(ini).read()
    said = megatrain("run", ini, "--set", "device.kind=cpu", "--max-steps", 2, cwd=tmp)
    steps, an_epoch = map(int, re.search(r"Steps +(\d+) .* (\d+) a pass over", said.stdout + said.stderr).groups())
    assert f"{an_epoch} updates an epoch" in open(ini).read() and f"{steps} updates in all" in open(ini).read(), (said, open(ini).read())
    assert steps < 50 or "warning" not in said.stderr, said.stderr
    chat = files(tmp)[1]
    ini = init(tmp, "alone", "--model", model, "--data", chat, "--set", "data.packing=off", "--set", "data.eval=10%")
    said = int(re.search(r"(\d+) updates an epoch", open(ini).read()).group(1))
    steps = int(re.search(r"(\d+) steps a pass", megatrain("data", "prepare", ini).stdout).group(1))
    assert abs(steps / said - 1) < 0.1, (said, steps)
    text = write(os.path.join(tmp, "few.jsonl"), lambda r, q, a: {"messages": [turn("user", q), turn("assistant", a)]}, 1)
    ini = init(tmp, "few", "--model", model, "--data", text)
    assert "\neval = " in open(ini).read() and "eval" not in values(ini), open(ini).read()
    megatrain("check", ini, "--set", "device.kind=cpu")
    text = files(tmp)[0]["pretrain"]
    got = [values(init(tmp, "start", "--model", of, "--data", text, *task))["init"]
           for of, task in ((model, ()), (model, ("--task", "pretrain")), (shape, ()))]
    assert got == ["weights", "random", "random"], got
    assert "rank" not in values(init(tmp, "on", "--task", "lora", "--set", "adapter.path=earlier"))  # they have their own
    short = write_model(os.path.join(tmp, "short"), config("qwen3", max_position_embeddings=512))
    assert values(init(tmp, "short", "--model", short))["seq_len"] == "512"  # with data that cannot be read, too


def what_does_not_fit_gets_leaner_settings():
    big = write_model(os.path.join(tmp, "big"), config("qwen3", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                                                       vocab_size=32000))
    for task, key, value in [("sft", "state_dtype", "8bit"), ("lora", "base_dtype", "nf4")]:
        for budget in range(1000, 8000, 500):
            options = ["--task", task, "--model", big, "--set", "model.init=random", "--set", f"memory.host_budget={budget}MiB",
                       "--set", "memory.device_budget=600MiB"]
            text = megatrain("-q", "config", "init", *options).stdout
            if f"{key} = {value}" in text:
                break
        else:
            raise AssertionError((task, text))
        ini = os.path.join(tmp, "lean.ini")
        open(ini, "w").write(text)
        megatrain("plan", ini)  # it fits, and says so without rates


def every_key_is_explained():
    keys = re.findall(r"^(\w+\.\w+) = ", megatrain("config", "keys").stdout, re.M)
    assert len(keys) > 140
    for key in random.Random(2).sample(keys, 6) + ["memory.activations", "optimizer.beta1"]:
        text = megatrain("config", "explain", key).stdout
        assert text.startswith(key + " = ") and "\nValues " in text and "\nRole " in text, text
        assert max(map(len, text.splitlines())) <= 78, text
    assert "Related     data.seq_len, train.batch_size" in megatrain("config", "explain", "train.tokens_per_step").stdout
    assert "adapter.alpha = 32" in megatrain("config", "explain", "lora_alpha").stdout  # another trainer's name
    assert megatrain("config", "explain", "eval").stdout.count("eval.") >= 5  # a section
    said = megatrain("config", "explain", "train.micro_bach", expect=2)
    assert "did you mean train.micro_batch?" in said.stderr and not said.stdout, said.stderr
    assert megatrain("help", "lora_alpha").stdout == megatrain("config", "explain", "lora_alpha").stdout
    assert megatrain("help", "keys").stdout == megatrain("config", "keys").stdout
    text = megatrain("config", "init", "--all").stdout
    assert set(keys) <= {f"{s}.{k}" for s, body in re.findall(r"^\[(\w+)\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)
                         for k in re.findall(r"^(\w+) =", body, re.M)}
    assert not [line for line in text.splitlines() if len(line) > 78]


#: keys of axolotl's qlora-3 example, LLaMA-Factory's llama3_lora_sft, TRL's GRPO and DPO, and unsloth's notebooks
RECIPES = ("base_model load_in_4bit datasets val_set_size output_dir adapter sequence_len sample_packing pad_to_sequence_len lora_r lora_alpha "
           "lora_dropout lora_target_linear wandb_project gradient_accumulation_steps micro_batch_size num_epochs optimizer lr_scheduler "
           "learning_rate bf16 tf32 gradient_checkpointing resume_from_checkpoint logging_steps flash_attention warmup_steps evals_per_epoch "
           "saves_per_epoch weight_decay special_tokens model_name_or_path trust_remote_code stage finetuning_type lora_rank lora_target "
           "template cutoff_len max_samples overwrite_cache preprocessing_num_workers dataloader_num_workers save_steps plot_loss "
           "overwrite_output_dir save_only_model report_to per_device_train_batch_size num_train_epochs lr_scheduler_type warmup_ratio "
           "val_size per_device_eval_batch_size eval_strategy eval_steps pref_beta pref_loss num_generations max_completion_length "
           "temperature epsilon reward_funcs use_vllm loss_type beta label_smoothing max_seq_length r target_modules bias random_state "
           "use_rslora loftq_config train_on_responses_only modules_to_save optim max_grad_norm seed save_total_limit").split()


def other_trainers_names_lead_to_ours():
    with open(os.path.join(data_env.ROOT, "src", "config", "synonyms.c")) as f:
        table = re.findall(r'^    \{"([a-z0-9_|"\s]+)",\s', f.read().split("*key, *theirs")[0], re.M)
    names = [n for row in table for n in re.sub(r'"\s+"', "", row).split("|")]
    assert len(names) > 200 and len(set(names)) == len(names), sorted(names)
    for name in names + RECIPES:
        text = megatrain("config", "explain", name).stdout
        ours = re.match(rf"{name}: here it is (\w+\.\w+)", text)
        assert not ours or f"\n{ours.group(1)} = " in text, text  # what it is called is a key, and is explained
    for value, words in (("optimizer.type=paged_adamw_8bit", "state_dtype = 8bit"), ("train.schedule=constant_with_warmup", "train.warmup"),
                         ("lora_r=8", "here it is adapter.rank"), ("preference.loss=dpo", "sigmoid")):
        assert words in megatrain("config", "init", "--set", value, expect=2).stderr, value
    assert "\npacking = False" in megatrain("config", "init", "--set", "data.packing=False").stdout


def mistakes_are_named():
    for options, words in [(["--task", "rlhf"], "there are sft, lora, qlora, dpo, pretrain, blocks; KTO, ORPO"),
                           (["--set", "train.epoch=1"], "did you mean \"epochs\"")]:
        assert words in megatrain("config", "init", *options, expect=2).stderr
    said = megatrain("config", "init", "--model", model, "--data", os.path.join(tmp, "none.jsonl"))
    assert "none.jsonl" in said.stderr and "usual ones" in said.stderr, said.stderr


def the_helper_s_packages_are_where_no_cleaner_looks():
    helper, data, cache = (os.path.join(tmp, d) for d in ("helper", "data-home", "cache-home"))
    os.makedirs(helper)
    open(os.path.join(helper, "prepare_data.py"), "w").close()
    with open(os.path.join(helper, "setup_data.py"), "w") as f:
        f.write("import sys\nprint('into', sys.argv[1])\n")
    env = {"MEGATRAIN_DATA_HELPER": os.path.join(helper, "prepare_data.py"), "MEGATRAIN_PYTHON": "", "XDG_DATA_HOME": data,
           "XDG_CACHE_HOME": cache}
    assert megatrain("setup-data", env=env).stdout.split() == ["into", os.path.join(data, "megatrain", "python")]
    for home in (cache, data):  # of an earlier version, and where it is made now, which comes first
        python = os.path.join(home, "megatrain", "python", "bin", "python")
        os.makedirs(os.path.dirname(python))
        open(python, "w").close()
        os.chmod(python, 0o755)
        assert json.loads(megatrain("doctor", "--json", env=env).stdout)["data helper's Python"] == python


with tempfile.TemporaryDirectory() as tmp:
    os.environ["XDG_CACHE_HOME"] = os.path.join(tmp, "cache")  # no rates of this machine
    shape = write_model(os.path.join(tmp, "shape"), config("qwen3", vocab_size=704, max_position_embeddings=2048))
    model = with_weights(tmp, shape, write_data(os.path.join(tmp, "ids.jsonl"), vocab=704))
    write_tokenizer(model, "qwen3")
    with open(os.path.join(model, "tokenizer.json")) as f:  # the turns' end stops the model, as in a real one
        end = next(t["id"] for t in json.load(f)["added_tokens"] if t["content"] == "<|im_end|>")
    for name in ("config.json", "generation_config.json"):
        path = os.path.join(model, name)
        if os.path.exists(path):
            with open(path) as f:
                of = json.load(f)
            with open(path, "w") as f:
                json.dump({**of, "eos_token_id": end}, f)
    only = sys.argv[1:]
    for case in [each_task_trains_as_it_stands, rows_and_steps_follow_the_data,
                 the_template_is_the_model_s_or_one_that_its_tokenizer_knows, what_is_printed_is_of_these_data,
                 what_does_not_fit_gets_leaner_settings,
                 every_key_is_explained, other_trainers_names_lead_to_ours, mistakes_are_named, the_helper_s_packages_are_where_no_cleaner_looks]:
        if only and case.__name__ not in only:
            continue
        case()
        print(f"ok {case.__name__}", flush=True)
