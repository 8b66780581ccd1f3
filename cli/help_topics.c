/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of help that are about no command: paragraphs, folded for a terminal; roff folds its own. One that begins with
 * spaces is a command or a line of a file, and stays as it is. */
#include "help_topics.h"

#include <stdbool.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/strbuf.h"
#include "hf/family.h"
#include "hf/refused.h"

enum { WIDTH = 78 };

static void print_folded(const char *text)
{
    struct mt_str s = {0};
    mt_str_fold(&s, "", text, WIDTH);
    fputs(s.p ? s.p : "", stdout);
    mt_str_finish(&s);
}

/* Of roff, a line that begins with a dot or an apostrophe is a request, and a backslash an escape. */
static void print_roff(const char *text)
{
    for (const char *p = text; *p; p++)
        fputs(*p == '\\' ? "\\e" : (char[]){*p, 0}, stdout);
    printf("\n");
}

static bool is_example(const char *text)
{
    return text && *text == ' ';
}

static void print_example(const char *text, bool opens, bool closes, int roff)
{
    if (opens)
        fputs(roff ? ".PP\n.nf\n" : "\n", stdout);
    if (roff)
        print_roff(text);
    else
        puts(text);
    if (closes && roff)
        fputs(".fi\n", stdout);
}

static void print_paragraphs(const char *const *text, int roff)
{
    for (int i = 0; text[i]; i++) {
        if (is_example(text[i])) {
            print_example(text[i], !i || !is_example(text[i - 1]), !is_example(text[i + 1]), roff);
            continue;
        }
        fputs(roff ? ".PP\n" : i ? "\n" : "", stdout);
        if (roff)
            print_roff(text[i]);
        else
            print_folded(text[i]);
    }
}

static void print_models(int roff)
{
    static const char *const intro[] = {
        "A model is a folder of Hugging Face: config.json, safetensors, the tokenizer's files. What decides is the class in "
        "\"architectures\" of config.json:",
        NULL};
    static const char *const rest[] = {
        "Grouped queries, QK-norm, biases, tied and untied embeddings, sliding windows and every RoPE scaling but multimodal ones "
        "are read from config.json. Another class is refused by name. Layers beyond the decoder (multi-token prediction) are "
        "copied, not trained.",
        "Weights are safetensors, one file or sharded, in bf16, f16, f32 or f64 (rounded to f32). Without weights a run begins "
        "with random ones. Matrices of layers may be packed: NF4 of bitsandbytes (nested scales, too), FP8 in blocks of 128x128 "
        "(scales in F32, BF16, F16 or E8M0) or with one scale a tensor (but not experts that are one tensor: Mistral Small 4 as released), int4 in groups of 32 of compressed-tensors, and MXFP4 of "
        "gpt-oss. Frozen ones stay packed in memory, on drives and over the link; trained ones are decoded. Other "
        "kinds of quantisation are refused by name.",
        "model.base_dtype = nf4, fp8 or mxfp4 packs frozen matrices when they are loaded; megatrain export --base-dtype does it "
        "once.",
        NULL};
    static const char *const known[] = {"Of these no model is trained, for what the class has:", NULL};
    const char *name, *reason;
    print_paragraphs(intro, roff);
    fputs(roff ? ".nf\n" : "\n", stdout);
    for (size_t i = 0; mt_family_at(i); i++)
        printf("  %-30s%s\n", mt_family_at(i)->architecture, mt_family_at(i)->moe ? " mixture of experts" : "");
    fputs(roff ? ".fi\n" : "\n", stdout);
    print_paragraphs(rest, roff);
    fputs(roff ? "" : "\n", stdout);
    print_paragraphs(known, roff);
    fputs(roff ? ".nf\n" : "\n", stdout);
    for (size_t i = 0; (name = mt_refused_at(i, &reason)); i++)
        printf("  %s: %s\n", name, reason);
    fputs(roff ? ".fi\n" : "", stdout);
}

static void print_adapters(int roff)
{
    static const char *const text[] = {
        "adapter.kind = lora or dora trains adapters on a frozen model, with rsLoRA, LoRA+, ranks and alphas by pattern, dropout "
        "(not with DoRA), and modules trained whole beside them (adapter.train_also).",
        "Names are those that transformers 5 gives the modules. all-linear means attention, dense MLPs and shared experts. The "
        "head, routers, gates of shared experts and routed experts get adapters only if they are named.",
        "Routed experts go by experts.gate_up_proj and experts.down_proj, in all layers or some. Where the model's files have "
        "experts one by one, each may be named instead, all of a model or none; not of Qwen2-MoE and HY-V3, for which PEFT drops "
        "these.",
        "Checkpoints and exports are folders of PEFT. adapter.path continues from such a folder, megatrain export --merge writes "
        "the whole model, and eval, sample, check and inspect take --adapter.",
        "adapter.merge_every = N merges adapters of lora while they are trained (ReLoRA): every N steps they are added to the "
        "weights, in the files' dtype, and new ones begin, with new optimizer states and a learning rate that rises again over "
        "adapter.merge_warmup updates. So the sum of all of them can have any rank, with memory for one. Each merge writes the "
        "matrices with adapters to an overlay beside the checkpoints, and reads them back; in bf16 it rounds, and says how much of "
        "the adapters is left: merge seldom, and at a rate that moves weights. What adapter.train_also trains is rounded to the "
        "files' dtype at each merge, too. Checkpoints belong to the overlay that they name, "
        "and export writes the whole model of each. Packed matrices (NF4, FP8) are refused: packing them again would lose what was "
        "added.",
        "megatrain run a.ini b.ini trains several, up to 64, on one base that is read once. Each has its own data, seed, "
        "ranks, rate, length and folder, and the bits of its run alone; one may fail, and the others go on. The model, "
        "dtypes, data.seq_len, train.micro_batch and optimizer.type are shared: where they differ the run is refused by "
        "name, and so are mixtures of experts, adapter.train_also, adapter.merge_every and train.groups. Placement is the "
        "first one's. The device holds the boundaries and activations of all: where those do not fit, and the machine "
        "has not been measured (megatrain probe all), activations are made again, for a third more compute; "
        "memory.activations = offload takes host memory instead. megatrain bench does it with a sweep's jobs that may "
        "share a base (share_base in [sweep]).",
        "The base is known by a checksum of every byte. Another base is refused on resume, by eval, sample and --merge. The same "
        "base in another format is not compared, and a warning says so.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_base(int roff)
{
    static const char *const text[] = {
        "A frozen parameter takes 2 bytes in host memory or on drives, or less if it is packed (0.52 in NF4, 0.53 in MXFP4, 0.56 "
        "in int4, 1 in FP8). It is never written.",
        "memory.base = files reads frozen weights in place, from the model's own safetensors files and past the page cache. No "
        "copy is made; host memory holds only what is on its way. auto does so where host memory is too small, and keeps as many "
        "blocks there as fit (memory.base_blocks). Unpacked tensors below 1 MiB stay in host memory, and FP8 weights with scales "
        "of F16 are not read in place.",
        "Each read is checked against the first one: a bit that flips in the file ends the run with file and tensor.",
        "Full checkpoints name frozen tensors by file and checksum instead of copying them (checkpoint.frozen). megatrain export "
        "completes the model.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_formats(int roff)
{
    static const char *const text[] = {
        "Conversations (messages, sharegpt), alpaca, prompts with completions, text and token ids are read from JSON lines, JSON, "
        "CSV, TSV, Parquet or Arrow, and from LLaMA-Factory's dataset_info.json. A prompt and its completion that are strings are "
        "joined as they stand, without the chat template; alpaca's instruction and output become turns of it. "
        "data.columns = instruction:question, output:answer (or prompt:question, completion:answer) reads files with other names. A data set that hf download --repo-type dataset ORG/NAME has fetched is hf://datasets/ORG/NAME.",
        "Text becomes tokens once, by the model's own tokenizer.json (or tekken.json or tiktoken.model, with the Python package "
        "tiktoken) and chat template; a cache keyed by content keeps them "
        "(data.cache_dir). Only the assistant's turns are trained, with the token that ends each (data.train_on).",
        "A .json or .jsonl is an array or lines by what it begins with. megatrain does not check role names; the chat template decides. "
        "A turn with \"train\": false (or \"loss\", \"trainable\", \"loss_mask\", \"training\": false, or \"weight\": 0) is not trained. "
        "Arguments of tool calls may be objects or strings of JSON; templates are given objects.",
        "Every command that reads the data warns of what has no effect: content, calls, tools and thoughts that the "
        "template does not print, keys that nothing reads, answers of which nothing but the end is trained. Conversations that the "
        "template refuses are left out, as many as data.max_untrained allows. megatrain data show prints samples with the trained "
        "tokens marked, megatrain data stats their lengths and shares.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_sampling(int roff)
{
    static const char *const text[] = {
        "megatrain sample is for trying a model, also one that is larger than the device. It keeps no keys and values of "
        "attention: each new token is computed with the whole text before it.",
        "Where weights stream to a GPU, a token costs their copies: at 25 GB/s 0.64 s for 8B in bf16 and 5.6 s for 70B, in which a "
        "GPU of 150 TFLOP/s computes some 6,000 tokens, those of all prompts of a --batch together, so that a text of 2,000 "
        "tokens costs nothing more (calculated, not measured). Where the model fits the device, a cache would be faster: on two CPU "
        "cores a model of 25 million parameters (8 layers, hidden 512) takes 0.08 s a token after 100 tokens, and 0.8 s after 2,000.",
        "To serve a model, export it (megatrain export), and use vLLM, or llama.cpp and its converters.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_preferences(int roff)
{
    static const char *const text[] = {
        "Preferences are pairs of a chosen and a rejected answer (\"prompt\", \"chosen\", \"rejected\", as strings or as lists of "
        "messages), or rated answers (\"prompt\", \"completion\", \"label\"). preference.loss trains on them: sigmoid is DPO. A pair "
        "lies in one row of data.seq_len tokens. megatrain data stats tells how often the longer answer is the chosen one.",
        "Log-probabilities of the reference are computed once, before the first step, by a pass forward over the data, and "
        "kept in checkpoints. preference.reference = start is the model as training begins; else it is the folder of another "
        "model or adapter, or a file that megatrain score made of the same data.",
        "Rounds with a server: answers are drawn by a program that serves the model (vLLM here), judged, and trained on; the "
        "next round begins with the adapter of the last one, which is then its reference. Each round is a run of its own. "
        "The server runs with",
        "  VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve Qwen/Qwen3-8B --enable-lora --max-lora-rank 16",
        "and takes the adapter of a round, whose checkpoints are folders of PEFT, by",
        "  curl http://localhost:8000/v1/load_lora_adapter -H 'Content-Type: application/json' \\",
        "    -d \"{\\\"lora_name\\\": \\\"round1\\\", \\\"lora_path\\\": \\\"$PWD/out/round1/latest\\\"}\"",
        "Draw several answers to each prompt of your own, and write the best and the worst of them as a pair:",
        "  curl http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\",
        "    -d '{\"model\": \"round1\", \"n\": 4, \"temperature\": 1, \"messages\": [{\"role\": \"user\", \"content\": \"...\"}]}'",
        "Which answer is better is for a program of yours to say: a test that it passes, another model's verdict. A model of your "
        "own judges by log-probability: write each answer as a line of \"prompt\" and \"completion\", those of a prompt "
        "one after the other, and --choices marks the likeliest:",
        "  megatrain score judge.ini --data round2-answers.jsonl --out round2-scores.jsonl --choices",
        "The first round trains an adapter (adapter.kind = lora), and the next ones go on from it, each with its pairs:",
        "  megatrain run dpo.ini --set data.train=round1.jsonl --out out/round1",
        "  megatrain run dpo.ini --set adapter.path=out/round1/latest --set data.train=round2.jsonl --out out/round2",
        "To stay near the model before all rounds instead, give each of them preference.reference = the model's folder.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_policy(int roff)
{
    static const char *const text[] = {
        "A policy is trained on rollouts: what it has sampled itself, with rewards. data.format = rollouts is JSON lines of "
        "\"token_ids\" and \"mask\" (1 for the policy's own tokens, 0 for prompts and results of tools), or of \"prompt_ids\" and "
        "\"completion_ids\"; of each token \"logprobs\" as the sampler had them, \"old_logprobs\" and \"ref_logprobs\" where keys need "
        "them; and a \"reward\" with the \"group\" that rollouts of a prompt have in common, or an \"advantage\", a number or a list. "
        "\"truncated\": true says that a completion was cut off (policy.truncated), \"temperature\" what it was sampled at.",
        "policy.loss names a formula: dapo, grpo, bnpo, dr_grpo, gspo, cispo, sapo, dppo, dro, opd; megatrain config explain policy.loss "
        "has them. Frameworks of the same name divide by other numbers: policy.normalise says by which.",
        "With policy.old = batch each rollout is trained once, by the policy that sampled it: ratios are 1, nothing is clipped, and a step "
        "costs what one on tokens does. For more updates of the same rollouts, policy.old = file takes log-probabilities from them.",
        "A sampler computes other log-probabilities than the trainer: policy.mismatch weighs by their ratio. Sample at "
        "policy.temperature, by which training divides logits, too. Routers of mixtures may send a token elsewhere in the sampler; no "
        "ratio mends that wholly.",
        "Rollouts of which all in a group have the same reward train nothing; frac_reward_zero_std in the metrics is their share. Names "
        "of metrics are TRL's.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_updates(int roff)
{
    static const char *const text[] = {
        "A trained parameter keeps 4 bytes of master weight, the optimizer's states (AdamW 8 bytes; optimizer.state_dtype = bf16 4, "
        "8bit 2.13; Lion half of that; SGD none) and, until its update, a gradient of 2 bytes (4 in f32). megatrain plan "
        "--optimizers compares them for a model and a machine: memory, time of a step, bytes written to drives.",
        "memory.update = forward updates weights under the forward pass of the next step. All gradients wait for that, in "
        "host memory or on drives; the norm of the whole gradient is known before.",
        "memory.update = backward updates each layer as soon as its gradient has arrived. Gradients need a few buffers instead of 2 "
        "bytes a parameter, drives carry none, and the host's threads and the drives work under backward. The norm of the "
        "whole gradient is not known then: it needs train.clip = unit, which clips the embedding, each layer and the head by its own "
        "norm, or train.grad_clip = 0. With the same clipping both orders give the same bits. With auto, plan and run take the faster "
        "one where the clipping allows both. The first layers (memory.update_pending) are still updated under the next forward, so that "
        "the end of a step waits for no update.",
        "What it costs: a step that has begun to update cannot be abandoned. An interruption (Ctrl-C) waits for its end; and a "
        "GPU or a drive that fails in backward leaves weights of two steps, so that the run goes on from its last checkpoint, where "
        "with updates under forward it would have saved the last step. Set checkpoint.every by what may be lost.",
        "A gradient that is not finite skips its layer where layers are clipped by themselves or not at all, in either order; with a "
        "norm of the whole gradient it skips the step. Either is warned of by name, and train.max_skips steps in a row end the run.",
        "optimizer.master = 24bit takes a byte less of each parameter, and rounds weights to 24 bits at each update; bf16 takes 2 less "
        "and rounds by chance, so that small updates are kept on average but each is noisy. What each takes of a model on a machine, with "
        "updates in either order, in bytes a parameter, seconds a step and GB written to drives, is in the rows of:",
        "    megatrain plan --model Llama-3.1-70B --machine rtx4090 --host-mem 128GiB --nvme 7GB/s --drives 2 --tokens-per-step 16Ki --optimizers",
        "To write little: updates under backward, memory.activations = recompute, memory.offload_layers = 0, fewer bytes of states and "
        "masters, more host memory. AdamW writes each step what memory does not hold. A layer at a time (train.blocks) and adapters write nothing.",
        "optimizer.type = adafactor makes its direction on the device: it has second moments of rows and columns, and with "
        "memory.update = backward it is AdaLOMO. Its steps are relative to the size of the weights, and it needs train.grad_clip = 0; the device then also "
        "loads the embedding and the moments in backward. muon makes orthogonal steps of the matrices of layers (optimizer.matrices), "
        "with a momentum that goes to the device and back each step, and has AdamW for all else; it is for pre-training, and for models that were "
        "trained with it, and its momentum has to fit host memory. apollo multiplies gradients of matrices by factors that Adam gives a random projection of "
        "them to optimizer.rank dimensions: moments of 8 rank bytes a row or column; with rank = 1, by_tensor = 1 and direction_scale = 128 it is APOLLO-Mini, nearly "
        "without states. galore has Adam's moments and steps in the space of the first optimizer.rank singular vectors of a matrix's gradient, which it finds "
        "anew every optimizer.projection_gap updates: 12 rank bytes a row or column, 8 of the larger side and 4 of the smaller. What lies outside of that space is not trained until then, "
        "and moments stay while the space turns. Finding it costs the GPU about 100 products of the gradient with rank + 64 vectors; on a CPU a rank of hundreds takes minutes for a large model. "
        "apollo takes nearly as little and needs no such vectors. With these, an interruption waits for the end of a step in either order.",
        "Not built, since the above hides the same time exactly: updates delayed by a step (ZeRO-Offload) and weights "
        "predicted for them (SpecTrain), which train with old weights; sampled activations (WTA-CRS), since activations are made again or "
        "offloaded and their memory is not what is short; sparse streaming (Top-KAST), which gains only where products are sparse. Nor zeroth "
        "order (MeZO, ZO2; optimizer.type = mezo is refused): its estimate of a gradient from two losses takes 10 to 100 times the steps, its update would have to go "
        "back to host memory or drives (2 bytes a parameter a step, 140 GB for 70B), and adapters on a packed base in files need as few bytes, write nothing and have gradients.",
        NULL};
    print_paragraphs(text, roff);
}

static void print_hosts(int roff)
{
    static const char *const text[] = {
        "Several machines train a model together if a launcher of MPI starts one process on each:",
        "    mpirun --hostfile hosts --map-by ppr:1:node --bind-to none megatrain run run.ini",
        "    srun --mpi=pmix -N 4 --ntasks-per-node=1 -c $SLURM_CPUS_ON_NODE megatrain run run.ini",
        "They share the groups of a step's micro-batches, so train.groups has to be a power of two, at least as large as the number of hosts "
        "times that of their GPUs (16 at most in all). The result has the same bits on any number of hosts, one among them: a run goes "
        "on with --resume on fewer or more. Three hosts with 8 groups have 3, 3 and 2 of them.",
        "The first host reads the configuration, decides, and writes checkpoints, metrics and what is printed. The others need the "
        "program, built alike against their MPI, model.path with its config.json, and the data, under the same paths; they get all "
        "settings, weights and states from the first. No folder is shared. Hosts need processors and GPUs of one kind: bits are those "
        "of the kind.",
        "Each host has all weights and states, as one alone would, and updates all of them. In each step a parameter's gradient "
        "crosses the network as partial sums in FP32, which one host adds up, and comes back as it is stored (optimizer.grad_dtype). "
        "That pays for large steps: the same bytes cross, however many tokens a step has. megatrain plan --hosts 4 --net 25Gb/s says "
        "what crosses, how long a step takes, and how many times as fast as one host that is.",
        "A host waits for another for cluster.timeout, 5 minutes. Then it is taken for lost: the first saves what the last whole step "
        "left, and all end. Hosts that have not met in 2 minutes end, too. A launcher that sees a process die ends all at once, without a save: set checkpoint.every. An "
        "interruption of any host, or megatrain stop DIR on the first, ends the run after the step, with a save; mpirun of Open MPI kills its "
        "processes soon after it was interrupted itself: prefer megatrain stop.",
        "Under the launcher, megatrain doctor says what the hosts have and what does not fit, and megatrain probe net measures their "
        "network for plan --hosts. megatrain help --man=cluster is a manual page with examples, and says when several hosts do not pay.",
        "Drives (memory.nvme_paths) and files that are read in place (memory.base = files) are each host's own, under the same paths: states "
        "on drives are written by every host, and the model's files are compared tensor by tensor at the start.",
        "Of one host: memory.activations = disk (it sends to drives what hosts send each other from memory), "
        "memory.update = backward (it updates a layer before gradients of hosts are added up), train.blocks and "
        "adapter.merge_every (the first host alone has the overlay that they write), and several configurations at once. Each is "
        "refused by name.",
        NULL};
    print_paragraphs(text, roff);
}

const struct cli_topic cli_topics[] = {
    {"models", "supported models and formats of weights", print_models},
    {"adapters", "LoRA and DoRA: what can have adapters, and how they are named", print_adapters},
    {"base", "frozen weights: packed, on drives, or read in place from the model's files", print_base},
    {"formats", "formats of training data, and what is trained of them", print_formats},
    {"updates", "optimizers and the order of updates: memory, time, and what a failure costs", print_updates},
    {"hosts", "several machines by MPI: what they need, what is sent, and what ends them", print_hosts},
    {"sampling", "what a token of megatrain sample costs, and what serves a model", print_sampling},
    {"preferences", "pairs and rated answers, references, rounds with a server", print_preferences},
    {"policy", "reinforcement learning: rollouts, losses, what to watch", print_policy},
};
const size_t cli_n_topics = MT_ARRAY_LEN(cli_topics);
