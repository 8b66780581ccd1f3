/* SPDX-License-Identifier: Apache-2.0 */
#include "config/schema.h"

#include <string.h>

#include "base/mem.h"
#include "optim/optimizer.h"

#define AT(field) offsetof(struct mt_config, field)
#define ANY 1, 0
#define POLICY numerics.objective_keys.policy

static const struct mt_key keys[] = {
    /* clang-format off */
    {"model", "path", MT_NUMERICS, MT_KEY_NAME_OR_PATH, AT(model.path), "", NULL, ANY, NULL,
     "Folder of the model, or its name (org/name) in the Hugging Face cache. Nothing is downloaded."},
    {"model", "init", MT_NUMERICS, MT_KEY_CHOICE, AT(model.init), "weights", "weights|random", ANY, NULL,
     "Start from the model's weights, or from random ones (then only config.json is needed)."},
    {"model", "dtype", MT_NUMERICS, MT_KEY_DTYPE, AT(numerics.dtype), "bf16", "bf16|f32", ANY, NULL,
     "Compute dtype. Master weights are FP32 either way."},
    {"model", "compute", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.compute), "auto", MT_COMPUTE_NAMES, ANY, NULL,
     "Products of the layers' linear layers. fp8: operands in e4m3 with a scale for each tensor and micro-batch, sums in FP32, "
     "forward and backward; head, attention, norms and routers stay in model.dtype. Packed weights, of FP8 too, are decoded "
     "and coded anew, once a load if that serves several micro-batches. This changes results. auto: as model.dtype. "
     "bf16 needs model.dtype = bf16, and so does fp8 on GPUs, which have it since compute capability 8.9."},
    {"model", "base_dtype", MT_NUMERICS, MT_KEY_CHOICE, AT(model.base_dtype), "auto", MT_PACKED_NAMES, ANY, NULL,
     "Pack frozen matrices of layers when they are loaded: nf4 4.1, mxfp4 4.3, int4 and nvfp4 4.5, fp8 8 bits a weight. This "
     "changes results. "
     "auto: as they are in the model's files."},
    {"model", "freeze", MT_NUMERICS, MT_KEY_LIST, AT(model.freeze), "", NULL, ANY, NULL,
     "Globs of tensors that are not trained, such as model.embed_tokens.*"},
    {"model", "share_layers", MT_RELEASED, MT_KEY_COUNT, AT(model.share_layers), "1", NULL, 1, 1e4, NULL,
     "From a random start, so many neighbouring layers have the same weights (fewer at the end, if they do not divide): 36 layers "
     "in groups of 4 have 9 sets of weights, gradients and optimizer states, in memory, over the link and in checkpoints. Layers "
     "of a group have equal parts and shapes; windows and rotary embeddings may differ. Models that are saved or exported have "
     "all layers. A run that goes on with 1 gives each layer its group's weights and states (Pseudo-to-Real)."},

    {"adapter", "kind", MT_NUMERICS, MT_KEY_CHOICE, AT(adapter.kind), "none", "none|lora|dora", ANY, NULL,
     "Train low-rank adapters on a frozen model (LoRA, or DoRA: with trained lengths of its rows), or the model itself. "
     "Checkpoints are then PEFT folders."},
    {"adapter", "rank", MT_NUMERICS, MT_KEY_COUNT, AT(adapter.rank), "16", NULL, 1, 4096, NULL,
     "Rank of the adapters: rows of A, columns of B."},
    {"adapter", "alpha", MT_NUMERICS, MT_KEY_REAL, AT(adapter.alpha), "32", NULL, 0, 1e6, NULL,
     "The output B A x of an adapter is multiplied by alpha / rank."},
    {"adapter", "targets", MT_NUMERICS, MT_KEY_LIST, AT(adapter.targets), "all-linear", NULL, ANY, NULL,
     "Modules with adapters, as transformers has them: names (q_proj, model.layers.3.mlp.up_proj), globs of whole names "
     "(*.layers.3.*), or all-linear: attention, dense and shared MLPs of every layer. By name alone: lm_head, and routed "
     "experts, each (all: *.experts.*) or together (experts.gate_up_proj, experts.down_proj)."},
    {"adapter", "rslora", MT_NUMERICS, MT_KEY_BOOL, AT(adapter.rslora), "off", NULL, ANY, NULL,
     "Multiply by alpha / sqrt(rank) instead of alpha / rank."},
    {"adapter", "rank_pattern", MT_NUMERICS, MT_KEY_LIST, AT(adapter.rank_pattern), "", NULL, ANY, NULL,
     "Other ranks for some modules, such as q_proj:32, *.layers.3.*:64; names as in targets, the first match counts."},
    {"adapter", "alpha_pattern", MT_NUMERICS, MT_KEY_LIST, AT(adapter.alpha_pattern), "", NULL, ANY, NULL,
     "Other alphas for some modules, written like rank_pattern."},
    {"adapter", "train_also", MT_NUMERICS, MT_KEY_LIST, AT(adapter.train_also), "", NULL, ANY, NULL,
     "Modules to train whole beside the adapters, such as lm_head or model.norm (PEFT's modules_to_save)."},
    {"adapter", "lr_ratio_b", MT_NUMERICS, MT_KEY_REAL, AT(adapter.lr_ratio_b), "1", NULL, 0, 1e6, NULL,
     "Learning rate of B divided by that of A (LoRA+ recommends 16)."},
    {"adapter", "dropout", MT_NUMERICS, MT_KEY_REAL, AT(adapter.dropout), "0", NULL, 0, 0.99, NULL,
     "Share of an adapter's input that is dropped in training, chosen by train.seed, step, module, token and column."},
    {"adapter", "path", MT_NUMERICS, MT_KEY_PATH, AT(adapter.path), "", NULL, ANY, NULL,
     "Continue from the adapters in this PEFT folder, with their rank, alpha and targets. Empty: start new ones."},
    {"adapter", "merge_aware", MT_NUMERICS, MT_KEY_CHOICE, AT(adapter.merge_aware), "off", MT_MERGE_AWARE_NAMES, ANY, NULL,
     "Train with the weights that export --merge will write: each load adds the adapters to a matrix and rounds it to bf16, or "
     "encodes it in the format that the base is packed in, which must be the one named. This changes results."},
    {"adapter", "merge_scale", MT_NUMERICS, MT_KEY_CHOICE, AT(adapter.merge_scale), "frozen", MT_MERGE_SCALE_NAMES, ANY, NULL,
     "With merge_aware: blocks keep the scales that the base has, or have those of the merged weights."},
    {"adapter", "merge_every", MT_NUMERICS, MT_KEY_COUNT, AT(adapter.merge_every), "0", NULL, 0, 1e12, NULL,
     "Steps after which adapters are added to the model's weights, and new ones begin, with new optimizer states (ReLoRA): what "
     "all of them add can have any rank. 0: never."},
    {"adapter", "merge_warmup", MT_NUMERICS, MT_KEY_COUNT, AT(adapter.merge_warmup), "10", NULL, 0, 1e12, NULL,
     "Updates after each merge over which the learning rate rises from 0 to what train.schedule has there."},

    {"data", "train", MT_NUMERICS, MT_KEY_PATHS, AT(data.train), "", NULL, ANY, NULL,
     "Training files, globs allowed: .jsonl, .json (an array), .csv and .tsv (with a header), all also .gz or .zst; .parquet, "
     ".arrow; dataset_info.json#NAME; hf://datasets/ORG/NAME, of the Hugging Face cache, which may go on with a path in it; "
     "anything else is plain text. FILE:2 visits its samples twice an epoch."},
    {"data", "eval", MT_HELD_OUT, MT_KEY_NAME_OR_FILE, AT(data.eval), "", NULL, ANY, NULL,
     "Evaluation data: a file, a number of samples, or a share (2%) held out by hash."},
    {"data", "format", MT_NUMERICS, MT_KEY_CHOICE, AT(data.format), "auto",
     MT_FORMAT_NAMES, ANY, NULL,
     "Format of samples; auto looks at the first one of each file. preference: chosen and rejected answers, rated: single "
     "ones with a label; both are for [preference]. requests: loglikelihood requests of lm-evaluation-harness, for score. rollouts: "
     "what a policy has sampled, with rewards, for [policy]."},
    {"data", "columns", MT_NUMERICS, MT_KEY_LIST, AT(data.columns), "", NULL, ANY, NULL,
     "What your files call the fields of a format: instruction:question, output:answer for turns of the chat template, "
     "prompt:question, completion:answer for text that is joined as it stands. Files of a dataset_info.json have their own."},
    {"data", "max_samples", MT_NUMERICS, MT_KEY_COUNT, AT(data.max_samples), "0", NULL, 0, 1e15, NULL,
     "Take no more samples of each file than this, the first that train a token: for a quick try. 0: all. Plain text is one."},
    {"data", "tokenizer", MT_NUMERICS, MT_KEY_WORD, AT(data.tokenizer), "model", "model|byte", ANY, NULL,
     "The model's own tokenizer, or bytes."},
    {"data", "template", MT_NUMERICS, MT_KEY_NAME_OR_FILE, AT(data.template_), "model",
     "model|chatml|llama3|mistral|gemma|qwen3|zephyr|alpaca", ANY, NULL,
     "Chat template: the model's own, a built-in one by name (chatml, llama3, mistral, gemma, qwen3, "
     "zephyr, alpaca), or a .jinja file. Checkpoints carry one that is not the model's own, for whatever reads them."},
    {"data", "train_on", MT_NUMERICS, MT_KEY_CHOICE, AT(data.train_on), "assistant", MT_TRAIN_ON_NAMES, ANY, NULL,
     "Which turns of a conversation are trained: the assistant's, its last, or all. \"train\": true or "
     "false in a message wins."},
    {"data", "seq_len", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.seq_len), "4096", NULL, 2, 1 << 24, NULL,
     "Tokens of a sequence, which is a row of packed samples."},
    {"data", "packing", MT_NUMERICS, MT_KEY_BOOL, AT(data.packing), "on", NULL, ANY, NULL,
     "Put several samples in a row; attention and positions stay within each."},
    {"data", "overlong", MT_NUMERICS, MT_KEY_CHOICE, AT(data.overlong), "error", "error|truncate|drop|split", ANY,
     NULL, "What to do with samples longer than seq_len. truncate keeps their beginning; of chosen and rejected answers that of "
     "each, seq_len / 2. split does not go with preferences."},
    {"data", "max_untrained", MT_OUTPUT, MT_KEY_AMOUNT, AT(data.max_untrained), "1%", NULL, 0, 1e15, NULL,
     "Refuse data of which more samples than this, or a larger share, have no token to train on, or are refused by the chat template. "
     "Fewer are left out; three always may be, if they are at most a tenth."},
    {"data", "shuffle", MT_NUMERICS, MT_KEY_BOOL, AT(data.shuffle), "on", NULL, ANY, NULL,
     "Visit rows in another random order each epoch."},
    {"data", "cache_dir", MT_OUTPUT, MT_KEY_PATH, AT(data.cache_dir), "auto", NULL, ANY, NULL,
     "Where token shards are kept; auto is $XDG_CACHE_HOME/megatrain."},

    {"train", "objective", MT_NUMERICS, MT_KEY_WORD, AT(train.objective), "cross_entropy", "cross_entropy|distill", ANY, NULL,
     "What is minimized, a mean over the trained tokens of a step: their loss, or the distance to a teacher ([distill])."},
    {"train", "steps", MT_LENGTH, MT_KEY_COUNT, AT(train.steps), "", NULL, 0, 1e15, NULL,
     "Optimizer steps of the run. Set exactly one of steps, epochs, tokens."},
    {"train", "epochs", MT_LENGTH, MT_KEY_REAL, AT(train.epochs), "", NULL, 0, 1e9, NULL,
     "Passes over the data, instead of steps."},
    {"train", "tokens", MT_LENGTH, MT_KEY_COUNT, AT(train.tokens), "", NULL, 0, 1e18, NULL,
     "Tokens to train on, instead of steps."},
    {"train", "tokens_per_step", MT_NUMERICS, MT_KEY_COUNT, AT(train.tokens_per_step), "", NULL, 0, 1e12, NULL,
     "Batch size in tokens, a multiple of data.seq_len. Set this or batch_size."},
    {"train", "batch_size", MT_NUMERICS, MT_KEY_COUNT, AT(train.batch_size), "", NULL, 0, 1e9, NULL,
     "Batch size in sequences, which are rows: with data.packing each holds several samples, so that a number of samples "
     "from another trainer makes far fewer steps here."},
    {"train", "micro_batch", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.micro_batch), "auto", NULL, 1, 1e6, NULL,
     "Sequences on the device at once. Changes the order of sums."},
    {"train", "chunk", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.chunk), "0", NULL, 0, 1 << 24, NULL,
     "Compute rows in chunks of so many tokens, which must divide data.seq_len, so that longer ones fit; 0: whole rows. "
     "Keys and values of a row are kept, and states of recurrences; nothing is approximated. Changes the order of sums."},
    {"train", "groups", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.groups), "1", NULL, 1, MT_MAX_GROUPS, NULL,
     "Sum each gradient in so many groups of a step's micro-batches, then add these sums by a fixed tree: a power of two, at "
     "most the micro-batches of a step. Changes the order of sums. Groups can be computed on several devices."},
    {"train", "learning_rate", MT_NUMERICS, MT_KEY_REAL, AT(train.learning_rate), "auto", NULL, 0, 1e3, NULL,
     "Peak learning rate; auto is 1e-5, with adapters 2e-4; on preferences and rollouts 1e-6, with adapters 1e-5."},
    {"train", "schedule", MT_NUMERICS, MT_KEY_CHOICE, AT(train.schedule), "cosine", "constant|linear|cosine|wsd",
     ANY, NULL, "Learning rate after warm-up."},
    {"train", "warmup", MT_NUMERICS, MT_KEY_AMOUNT, AT(train.warmup), "3%", NULL, 0, 1e15, NULL,
     "Warm-up in steps, or as a share of all steps, rounded up."},
    {"train", "decay", MT_NUMERICS, MT_KEY_AMOUNT, AT(train.decay), "10%", NULL, 0, 1e15, NULL,
     "wsd: number of steps at the end, or share of all steps, over which the rate falls."},
    {"train", "min_lr_ratio", MT_NUMERICS, MT_KEY_REAL, AT(train.min_lr_ratio), "0.1", NULL, 0, 1, NULL,
     "Lowest learning rate as a share of the peak. Schedules of transformers, axolotl and LLaMA-Factory end at 0."},
    {"train", "grad_clip", MT_NUMERICS, MT_KEY_REAL, AT(numerics.grad_clip), "1.0", NULL, 0, 1e30, NULL,
     "Gradient norm above which gradients are scaled down; 0 = off."},
    {"train", "clip", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.clip), "global", MT_CLIP_NAMES, ANY, NULL,
     "Whose norm that is. global: the whole gradient's. unit: of the embedding, each layer and the head by itself. With unit, or "
     "without grad_clip, a gradient that is not finite skips only these."},
    {"train", "router_aux_loss", MT_NUMERICS, MT_KEY_REAL, AT(numerics.router_aux_loss), "0", NULL, 0, 1e3, NULL,
     "Mixtures of experts: coefficient of the load-balancing loss, as router_aux_loss_coef in transformers, over all layers "
     "and tokens of a step. Several GPUs need device.map = data for it. The coefficient in config.json is not used; 0 = off."},
    {"train", "blocks", MT_NUMERICS, MT_KEY_STRING, AT(train.blocks), "off", NULL, ANY, NULL,
     "Train one block of layers at a time, with the rest frozen (BAdam, LISA). layers: each layer is a block. A number: into so "
     "many blocks the layers are divided. Optimizer states are of one block alone, and begin anew with each. When the next begins, "
     "a block is rounded to the dtype of the model's files; the log says what that leaves. off: all at once."},
    {"train", "block_steps", MT_NUMERICS, MT_KEY_COUNT, AT(train.block_steps), "100", NULL, 1, 1e12, NULL,
     "Steps in which a block is trained before the next one is. The data and the learning rate go on."},
    {"train", "block_order", MT_NUMERICS, MT_KEY_CHOICE, AT(train.block_order), "random", "random|ascending|descending", ANY, NULL,
     "Order of blocks in a round, which has each of them once. random: another order each round, by train.seed."},
    {"train", "blocks_always", MT_NUMERICS, MT_KEY_LIST, AT(train.blocks_always), "", NULL, ANY, NULL,
     "Globs of tensors that are trained with every block, such as model.embed_tokens.*, lm_head.* (LISA). Else embedding, head and "
     "last norm stay as they are."},
    {"train", "delink_at", MT_RELEASED, MT_KEY_COUNT, AT(train.delink_at), "0", NULL, 0, 1e15, NULL,
     "With model.share_layers: the step after which the run goes on as with 1, which needs the memory that a plan with 1 shows. "
     "It saves a checkpoint there, and goes on from it; its start warns if that will not fit. 0: never."},
    {"train", "seed", MT_NUMERICS, MT_KEY_COUNT, AT(train.seed), "42", NULL, 0, 9e15, NULL,
     "Seed of all random numbers."},
    {"train", "max_skips", MT_NUMERICS, MT_KEY_COUNT, AT(train.max_skips), "5", NULL, 1, 1e9, NULL,
     "Stop the run after this many steps in a row in which any gradient is not finite."},

    {"preference", "loss", MT_NUMERICS, MT_KEY_WORD, AT(preference.loss), "off",
     "off|sigmoid|sigmoid_norm|ipo|hinge|robust|apo_zero|apo_down|simpo|cpo|orpo|kto|apo_zero_unpaired", ANY,
     "kto_pair|exo_pair|nca_pair|bco_pair|sppo_hard|aot|aot_unpaired|discopop|sft",
     "Train on preferences (data.format = preference or rated) by this loss: sigmoid is DPO's; simpo, cpo and orpo need no "
     "reference; kto and apo_zero_unpaired take rated answers. The other losses need the log-probabilities of a reference, which are "
     "computed before the first step."},
    {"preference", "beta", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.beta), "auto", NULL, 1e-6, 1e6, NULL,
     "How strongly differences of log-probability count; the smaller, the further the model may go from the reference. "
     "auto: 0.1, with simpo 2."},
    {"preference", "gamma", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.gamma), "0.5", NULL, 0, 1e6, NULL,
     "simpo: the margin by which the chosen answer is to win (simpo_gamma of TRL)."},
    {"preference", "label_smoothing", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.label_smoothing), "0", NULL, 0, 0.499,
     NULL, "Share of pairs that are assumed to be labelled the wrong way round: sigmoid, sigmoid_norm, robust, simpo, cpo."},
    {"preference", "sft", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.sft), "auto", NULL, 0, 1e6, NULL,
     "Weight of the mean token loss of chosen answers beside the preference. auto: 0, with cpo and orpo 1."},
    {"preference", "sft_tokens", MT_NUMERICS, MT_KEY_CHOICE, AT(preference.sft_tokens), "answer", "answer|all", ANY, NULL,
     "Tokens of that loss: the chosen answer's, or its prompt's too, as TRL has it in ORPO."},
    {"preference", "reference", MT_NUMERICS, MT_KEY_NAME_OR_PATH, AT(preference.reference), "start", NULL, ANY, NULL,
     "Whose log-probabilities answers are compared with: start, the model as it is before the first step; the folder of another "
     "model, or of an adapter of this one; or a file that megatrain score made of the same data."},
    {"preference", "desirable_weight", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.desirable_weight), "1", NULL, 0, 1e6,
     NULL, "Rated answers: weight of the desirable ones."},
    {"preference", "undesirable_weight", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.undesirable_weight), "1", NULL, 0,
     1e6, NULL, "Rated answers: weight of the undesirable ones."},

    {"policy", "loss", MT_NUMERICS, MT_KEY_WORD, AT(policy.loss), "off",
     "off|dapo|grpo|bnpo|dr_grpo|gspo|cispo|sapo|dppo|dro|opd|es", ANY, "ppo|reinforce|rloo|reinforce_plus_plus|remax|vespo|luspo",
     "Train a policy on rollouts (data.format = rollouts) by this loss of r = p / p_old and advantage A. grpo, bnpo, dapo, dr_grpo: "
     "-min(r A, clip(r) A), which differ in policy.normalise; gspo: of one ratio a rollout; cispo: -min(r, clip_high) A log p, the "
     "factor held; sapo: a soft clip; dppo: masks tokens whose probability moved too far; dro: a pull to p_old; opd: to ref_logprobs. "
     "es: evolution strategies, by rewards of perturbed weights alone (optimizer.type = mezo)."},
    {"policy", "clip_low", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.clip_low), "auto", NULL, 0, 1e6, NULL,
     "Ratios count from 1 - clip_low on; with dppo and opd, how far a probability may have fallen. auto: 0.2, gspo 3e-4."},
    {"policy", "clip_high", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.clip_high), "auto", NULL, 0, 1e6, NULL,
     "Ratios count up to 1 + clip_high, with cispo up to clip_high; with dppo, how far a probability may have risen. auto: 0.2, "
     "gspo 4e-4, cispo 5. DAPO's paper has 0.28."},
    {"policy", "dual_clip", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.dual_clip), "0", NULL, 0, 1e6, NULL,
     "grpo, bnpo, dapo, dr_grpo, gspo: where A < 0, the loss is at most -dual_clip A; above 1, such as 3. 0: off."},
    {"policy", "kl", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.kl), "k3", "k3|k1|k3_ratio", ANY, NULL,
     "Estimate of the divergence from the reference, d = log p_ref - log p: k3 is exp(d) - d - 1, k1 is -d. k3_ratio: k3 times r, with "
     "the gradient of both (use_bias_correction_kl of TRL, its default); not with gspo."},
    {"policy", "kl_weight", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.kl_weight), "0", NULL, 0, 1e6, NULL,
     "Weight of that divergence beside the loss (beta in TRL). Rollouts then have ref_logprobs."},
    {"policy", "normalise", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.normalise), "auto", MT_POLICY_NORMALISE_NAMES, ANY, NULL,
     "What the sum over tokens is divided by. tokens: those of the step; micro: those of the micro-batch, then the micro-batches; rows: "
     "each rollout's tokens, then the rollouts; constant: the rollouts times policy.max_tokens. auto: tokens for dapo, cispo, dppo, dro, opd; "
     "micro for bnpo; rows for grpo, gspo, sapo; constant for dr_grpo."},
    {"policy", "max_tokens", MT_NUMERICS, MT_KEY_COUNT, AT(POLICY.max_tokens), "0", NULL, 0, 1 << 24, NULL,
     "Most tokens of a completion: of normalise = constant, and what rollouts are asked for."},
    {"policy", "scale", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.scale), "auto", MT_POLICY_SCALE_NAMES, ANY, NULL,
     "Where rollouts have a reward and a group, A is the reward less the group's mean, divided by (deviation + 1e-4) of the group's "
     "or of all rewards, or by nothing. auto: group, with dr_grpo and es none."},
    {"policy", "old", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.old), "batch", "batch|file", ANY, NULL,
     "p_old. batch: the policy as it is, one update for each rollout: r is exactly 1. file: old_logprobs of the rollouts, or else "
     "logprobs; it costs one more product with the output matrix."},
    {"policy", "mismatch", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.mismatch), "none", "none|token|row", ANY, NULL,
     "Where the sampler's logprobs are not p_old: multiply the loss by exp(log p_old - logprob) of each token, or of its rollout's "
     "tokens together."},
    {"policy", "mismatch_max", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.mismatch_max), "3", NULL, 0, 1e6, NULL,
     "Largest such factor."},
    {"policy", "mismatch_beyond", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.beyond), "cut", "cut|drop", ANY, NULL,
     "What is beyond it is cut to it, or dropped: row and drop are TRL's default."},
    {"policy", "beta", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.beta), "auto", NULL, 0, 1e6, NULL,
     "dro: half of it weighs (log r)^2; dppo: it does. auto: 0.05, with dppo 1e-3."},
    {"policy", "tau_positive", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.tau_positive), "1", NULL, 1e-6, 1e6, NULL,
     "sapo: temperature of its sigmoid where A > 0."},
    {"policy", "tau_negative", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.tau_negative), "1.05", NULL, 1e-6, 1e6, NULL,
     "sapo: and elsewhere."},
    {"policy", "temperature", MT_NUMERICS, MT_KEY_REAL, AT(POLICY.temperature), "1", NULL, 0, 100, NULL,
     "That rollouts were sampled at: training divides logits by it, too. 0, with es alone: the likeliest tokens."},
    {"policy", "rollouts", MT_OUTPUT, MT_KEY_STRING, AT(policy.rollouts), "", NULL, ANY, NULL,
     "Train in rounds: generate, this program's own, or a command that writes rollouts of each round's prompts (megatrain help policy). It is "
     "run without a shell. Empty: data.train has the rollouts."},
    {"policy", "prompts", MT_NUMERICS, MT_KEY_PATH, AT(policy.prompts), "", NULL, ANY, NULL,
     "Prompts of rounds, a JSON object a line: \"prompt\", \"messages\" or \"prompt_ids\", and what the reward needs."},
    {"policy", "prompts_per_round", MT_NUMERICS, MT_KEY_COUNT, AT(policy.prompts_per_round), "16", NULL, 1, 1e9, NULL,
     "Prompts of a round. Each comes once before any comes twice, in an order by train.seed."},
    {"policy", "samples", MT_NUMERICS, MT_KEY_COUNT, AT(policy.samples), "8", NULL, 1, 1e6, NULL,
     "Rollouts of each prompt, which are a group; with es of each variant of the weights."},
    {"policy", "refill", MT_NUMERICS, MT_KEY_COUNT, AT(policy.refill), "0", NULL, 0, 1000, NULL,
     "How often a round may take further prompts in place of those whose rollouts all have the same reward, which train nothing; what is "
     "still lacking then is made up of these. 0: never."},
    {"policy", "steps_per_round", MT_NUMERICS, MT_KEY_COUNT, AT(policy.steps_per_round), "1", NULL, 1, 1e9, NULL,
     "Steps that train on a round's rollouts; above 1 with policy.old = file. train.steps is of all rounds, train.batch_size of a step: "
     "prompts_per_round times samples takes all of a round at once; es needs 2 mezo.samples times as many."},
    {"policy", "reward", MT_NUMERICS, MT_KEY_STRING, AT(policy.reward), "", NULL, ANY, NULL,
     "Rewards of rounds: exact, number, regex (\"completion\" against \"answer\"), schema (JSON against \"schema\"), or a command: rollouts on its "
     "standard input, a number or an object with \"reward\" a line on its output, without a shell. Empty: rollouts have rewards."},
    {"policy", "reward_seconds", MT_OUTPUT, MT_KEY_REAL, AT(policy.reward_seconds), "600", NULL, 0.01, 1e9, NULL,
     "What that command may take for a round."},
    {"policy", "truncated", MT_NUMERICS, MT_KEY_CHOICE, AT(POLICY.truncated), "keep", "keep|mask|drop", ANY, NULL,
     "Rollouts that were cut off (\"truncated\": true). mask: not trained, but their reward counts in its group; drop: as if they were not there."},

    {"distill", "teacher", MT_NUMERICS, MT_KEY_PATH, AT(distill.teacher), "", NULL, ANY, NULL,
     "train.objective = distill: the teacher's likeliest tokens, a file that megatrain score --top made of the same data. The loss is "
     "the forward KL divergence over these tokens and all others together."},
    {"distill", "top", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.objective_keys.top), "20", NULL, 1, 1024, NULL,
     "How many of the teacher's tokens are learned from; the file may hold more."},
    {"distill", "temperature", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.temperature), "1", NULL, 0.01, 100, NULL,
     "Above 1, probabilities of teacher and student are flattened before they are compared: p^(1/temperature) of the top tokens and of "
     "all others together, made to sum to 1. The divergence is multiplied by its square."},
    {"distill", "sft", MT_NUMERICS, MT_KEY_REAL, AT(numerics.objective_keys.share), "0", NULL, 0, 1, NULL,
     "Share of the data's own tokens: (1 - sft) times the divergence, and sft times the token loss."},

    {"optimizer", "type", MT_NUMERICS, MT_KEY_WORD, AT(optimizer.type), "adamw", mt_optimizer_types + 1, ANY, NULL,
     "adamw: w -= lr wd w + lr m / (sqrt(v) + eps), bias-corrected, decay decoupled. lion: steps of the sign of a mean of "
     "gradients, one state; wants a rate 3 to 10 times smaller. sgd: steps of the gradient, without a state or with momentum. adafactor: "
     "second moments of rows and columns, steps of a size relative to the weights' (rates of 1e-3 to 1e-2). muon: orthogonal steps of matrices, AdamW for all else, at AdamW's rates; for "
     "pre-training and models that were trained with it. apollo: the gradients of matrices, scaled by channels as Adam would scale a "
     "projection of them; AdamW for all else. galore: Adam of the matrices' gradients in a space of their singular vectors; AdamW for all else. These four need train.grad_clip = 0. "
     "mezo: steps along random noise, by losses alone ([mezo]); 10 to 100 times as many steps."},
    {"optimizer", "matrices", MT_NUMERICS, MT_KEY_LIST, AT(optimizer.matrices), "", NULL, ANY, NULL,
     "Globs of the tensors whose steps muon makes orthogonal, apollo scales, or galore projects; the others have AdamW. Empty: the matrices of layers, each "
     "expert's by itself, without routers."},
    {"optimizer", "weight_decay", MT_NUMERICS, MT_KEY_REAL, AT(numerics.weight_decay), "0.0", NULL, 0, 1e3, NULL,
     "Decoupled weight decay; never for biases and norms."},
    {"optimizer", "decay_embeddings", MT_NUMERICS, MT_KEY_BOOL, AT(numerics.decay_embeddings), "on", NULL, ANY,
     NULL, "Decay embeddings and lm_head too, as transformers does."},
    {"optimizer", "state_dtype", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.state_type), "f32", MT_STATE_TYPE_NAMES, ANY,
     NULL, "Numbers of the optimizer's states. bf16 halves their memory and traffic; rounded to the nearest after every "
     "update, a second moment decays correctly only with beta2 of 0.99 or less. 8bit takes 1.0625 bytes each: blocks of 32 with "
     "a scale, and f32 for vectors (norms, biases)."},
    {"optimizer", "rounding", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.rounding), "nearest", MT_ROUNDING_NAMES, ANY, NULL,
     "Rounding of states in bf16: to the nearest, or up or down by chance (by train.seed, update, tensor and element), "
     "which keeps their mean."},
    {"optimizer", "master", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.master), "f32", MT_MASTER_NAMES, ANY, NULL,
     "Masters of trained weights. 24bit takes 3 bytes a weight in place of 4 and rounds each update to 16 bits of mantissa; bf16 "
     "takes 2 and rounds up or down by chance (by train.seed, update, tensor and element). Both need model.dtype = bf16."},
    {"optimizer", "grad_dtype", MT_NUMERICS, MT_KEY_DTYPE, AT(numerics.grad_dtype), "auto", "auto|bf16|f32", ANY,
     NULL, "Dtype of gradients on their way to the host; auto is the compute dtype."},

    {"mezo", "eps", MT_NUMERICS, MT_KEY_REAL, AT(numerics.mezo.eps), "1e-3", NULL, 1e-9, 1, NULL,
     "optimizer.type = mezo: a step computes the losses of w + eps z and w - eps z, z noise of variance 1, and is w -= lr ((difference) / "
     "(2 eps) z + weight_decay w). Nothing else is kept: no gradients, records or states. policy.loss = es takes mean rewards for losses."},
    {"mezo", "samples", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.mezo.samples), "1", NULL, 1, MT_MAX_SAMPLES, NULL,
     "Noises of a step, whose steps' mean is taken. Each costs two forward passes; weights are loaded once for all."},
    {"mezo", "layers", MT_NUMERICS, MT_KEY_REAL, AT(numerics.mezo.layers), "1", NULL, 1e-6, 1, NULL,
     "Share of the layers that are perturbed and updated in a step, drawn anew for each (LeZO); the embedding and the head always are."},
    {"mezo", "small", MT_NUMERICS, MT_KEY_REAL, AT(numerics.mezo.small), "1", NULL, 1e-6, 1, NULL,
     "Share of each tensor's weights, the smallest, that are perturbed and follow the losses (Sparse-MeZO): those whose size is at most "
     "what this share had when the run began. Weight decay is of all."},
    {"mezo", "noise", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.mezo.noise), "normal", MT_NOISE_NAMES, ANY, NULL,
     "Distribution of z. Signs take fewer random numbers: updates on the host take less time."},

    {"memory", "device_budget", MT_MACHINE, MT_KEY_SIZE, AT(placement.device_budget), "auto", NULL, ANY, NULL,
     "Device memory to use, such as 20GiB; auto: a GPU's free memory less 1 GiB or 4% (1.5 GiB with a display, an eighth under WSL); "
     "where GPU and host have one memory (DGX Spark) a quarter of it, and the host has the rest; on the "
     "cpu device a quarter of the host budget, which is filled with copies of layers as on a GPU: less takes less memory."},
    {"memory", "host_budget", MT_MACHINE, MT_KEY_SIZE, AT(placement.host_budget), "90%", NULL, ANY, NULL,
     "Host memory to use, or a share of what is available."},
    {"memory", "states", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.states), "auto", MT_STATES_NAMES, ANY,
     NULL, "Home of master weights and moments. host: host memory. disk: the drives of nvme_paths. auto: host memory, and the "
     "drives for what does not fit."},
    {"memory", "base", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.base), "auto", MT_BASE_NAMES, ANY, NULL,
     "Home of frozen weights. host: host memory. disk: copied to the drives of nvme_paths. files: read in place from the "
     "model's own files (tensors below 1 MiB stay in host memory). auto: host memory, else the files, else the drives."},
    {"memory", "base_blocks", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.base_blocks), "auto", NULL, 0, 1 << 20, NULL,
     "Number of blocks whose frozen weights stay in host memory even with base = files: layers first, evenly spaced, "
     "then the embedding and the head. auto: 0, or as many as fit where base = auto chose the files."},
    {"memory", "update", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.update), "auto", MT_UPDATE_ORDER_NAMES, ANY, NULL,
     "When weights are updated. forward: under the next step's forward. backward: each layer as soon as its gradient has arrived, "
     "so that gradients need no memory and no drives; needs train.clip = unit or train.grad_clip = 0. A device that fails then costs "
     "the steps since the last checkpoint. auto: what the search finds faster."},
    {"memory", "update_pending", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.update_pending), "auto", NULL, 0, 1 << 20, NULL,
     "With update = backward: number of layers, the first ones, that are updated under the next step's forward nevertheless, as the "
     "embedding is. auto: 1, or what the search finds faster."},
    {"memory", "nvme_paths", MT_MACHINE, MT_KEY_PATHS, AT(memory.nvme_paths), "", NULL, ANY, NULL,
     "Folders on the drives to stripe over. They must exist. What is there is scratch; only checkpoints are needed to "
     "resume."},
    {"memory", "nvme_checksums", MT_PLACEMENT, MT_KEY_BOOL, AT(placement.nvme_checksums), "on", NULL, ANY, NULL,
     "Check everything that is read back from the drives against checksums in host memory. Other data end the run "
     "before a checkpoint has them."},
    {"memory", "verify", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.verify), "frozen", MT_VERIFY_NAMES, ANY, NULL,
     "Search for bits that flip in host memory. frozen: frozen weights, every 16th step; damage is read from the model's files "
     "again. all: trained weights and states too, summed by each update; damage ends the run. off: none."},
    {"memory", "slots", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.slots), "auto", NULL, 2, 32767, NULL,
     "Number of units (layers, or halves) whose weights are on the device at once. auto: 3, or all if they fit."},
    {"memory", "unit", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.unit), "auto", MT_UNIT_CUT_NAMES, ANY, NULL,
     "What is loaded to the device at once: a layer, or its attention or MLP half. auto: halves where layers do not fit, "
     "or where the search finds them faster."},
    {"memory", "expert_group", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.expert_group), "auto", NULL, 1, 1024, NULL,
     "Experts of a mixture that are loaded together. auto: as many as 256 MiB hold, in bf16 or packed."},
    {"memory", "expert_sums", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.expert_sums), "auto", NULL, 1, 1024, NULL,
     "How often the outputs of a mixture's experts are summed in a layer. Fewer sums are faster, and keep more outputs. auto: as "
     "few as take a seventh of the device's memory. With train.groups above 1: for each group of experts that is loaded."},
    {"memory", "activations", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.activations), "auto",
     MT_ACTIVATIONS_NAMES, ANY, NULL,
     "Activations saved for backward. keep: on the device. offload: in host memory. disk: in host memory, then drives. "
     "recompute: not saved."},
    {"memory", "keep_layers", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.keep_layers), "auto", NULL, 0, 1024, NULL,
     "With activations = recompute: number of last layers whose activations stay on the device."},
    {"memory", "offload_layers", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.offload_layers), "auto", NULL, 0, 1024,
     NULL, "With activations = recompute: number of other layers, evenly spaced, whose activations go to host memory."},
    {"memory", "offload_attention", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.offload_attention), "auto", NULL, 0, 1024,
     NULL, "Like offload_layers, for attention's activations alone. 0 recomputes them. auto: the search decides, or "
     "offload_layers."},
    {"memory", "offload", MT_PLACEMENT, MT_KEY_TEXT, AT(placement.offload), "auto", NULL, ANY, NULL,
     "Like offload_layers, for activations by name, such as attention.out:12, mlp:3. auto: the search decides, or none."},
    {"memory", "embedding", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.embedding), "auto", MT_EMBEDDING_NAMES, ANY, NULL,
     "Where forward takes a trained embedding's rows. device: from a copy of the table, after its update. host: rows of "
     "the step's tokens are updated first and sent alone (its states must be in host memory). auto: what the search finds faster."},
    {"memory", "adapters", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.adapters), "auto", MT_ADAPTERS_NAMES, ANY, NULL,
     "Where adapters are during a step. streamed: sent with each layer. resident: all on the device, sent once a step. "
     "auto: what the search finds faster."},
    {"memory", "logits_chunk", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.logits_chunk), "auto", NULL, 64, 1 << 24,
     NULL, "Rows of logits whose gradients are on the device at once; a multiple of 64. Changes the order of sums."},
    {"memory", "logits_piece", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.logits_piece), "auto", NULL, 64, 1 << 24,
     NULL, "Rows of FP32 logits at once, a part of a chunk; a multiple of 64. auto: 512 where logits_chunk is auto and larger, "
     "else the whole chunk."},
    {"memory", "latent_cache", MT_OUTPUT, MT_KEY_BOOL, AT(memory.latent_cache), "off", NULL, ANY, NULL,
     "megatrain generate and sample with multi-head latent attention (DeepSeek-V3, Kimi) keep latents of earlier tokens, not keys and "
     "values: some 70 times less of DeepSeek-V3; each pass makes these again. The same bits on the cpu device; on a GPU products of other "
     "sizes may round otherwise, so it is on only if set. Not with model.compute = fp8. Compare: megatrain plan --generate."},
    {"memory", "pin", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.pin), "auto", MT_PIN_NAMES, ANY, NULL,
     "Host memory to pin (lock) for copies. auto, all: all of it. staging: a small ring that copies pass through; slower, for "
     "systems with a low limit of locked memory."},

    {"eval", "every", MT_OUTPUT, MT_KEY_COUNT, AT(eval.every), "200", NULL, 0, 1e15, NULL,
     "Steps between evaluations; 0 = only at the end."},
    {"eval", "sets", MT_OUTPUT, MT_KEY_NAMED_PATHS, AT(eval.sets), "", NULL, ANY, NULL,
     "Further evaluation data by name, evaluated and reported beside data.eval: code:code.jsonl, math:math.jsonl."},
    {"eval", "generate", MT_OUTPUT, MT_KEY_PATH, AT(eval.generate), "", NULL, ANY, NULL,
     "Prompts, as megatrain generate reads them: each evaluation writes the likeliest answers to answers-STEP.jsonl of the output folder, "
     "and with policy.reward measures the mean reward. Some 20 do: their cache takes memory from the run."},
    {"eval", "generate_tokens", MT_OUTPUT, MT_KEY_COUNT, AT(eval.generate_tokens), "128", NULL, 1, 1 << 20, NULL,
     "Most tokens of an answer to a prompt of eval.generate."},
    {"eval", "max_samples", MT_OUTPUT, MT_KEY_COUNT, AT(eval.max_samples), "512", NULL, 1, 1e15, NULL,
     "Most samples in an evaluation, of each set."},
    {"eval", "at_start", MT_OUTPUT, MT_KEY_BOOL, AT(eval.at_start), "on", NULL, ANY, NULL,
     "Evaluate before the first step."},
    {"eval", "early_stop_patience", MT_OUTPUT, MT_KEY_COUNT, AT(eval.early_stop_patience), "0", NULL, 0, 1e9,
     NULL, "Stop after this many evaluations without a better one (best_by), with the best one kept; 0 = never."},
    {"eval", "best_by", MT_OUTPUT, MT_KEY_STRING, AT(eval.best_by), "loss", NULL, ANY, NULL,
     "What makes an evaluation the best, for early_stop_patience and checkpoint.keep_best: loss, accuracy (of tokens), those "
     "of a set of eval.sets (code_loss, code_accuracy), a measure of preferences, such as rewards/accuracies or rewards/margins, or reward (of answers to eval.generate). Whether more is better follows from the name."},

    {"checkpoint", "dir", MT_OUTPUT, MT_KEY_PATH, AT(checkpoint.dir), "out", NULL, ANY, NULL,
     "Output folder: checkpoints, metrics, the effective configuration."},
    {"checkpoint", "every", MT_OUTPUT, MT_KEY_INTERVAL, AT(checkpoint.every), "500", NULL, ANY, NULL,
     "Steps, or a duration such as 30m, between checkpoints; 0 = only at the end."},
    {"checkpoint", "keep", MT_OUTPUT, MT_KEY_COUNT, AT(checkpoint.keep), "2", NULL, 1, 1e9, NULL,
     "Newest checkpoints to keep."},
    {"checkpoint", "keep_every", MT_OUTPUT, MT_KEY_COUNT, AT(checkpoint.keep_every), "0", NULL, 0, 1e15, NULL,
     "Also keep those whose step is a multiple of this; 0 = none."},
    {"checkpoint", "keep_best", MT_OUTPUT, MT_KEY_BOOL, AT(checkpoint.keep_best), "on", NULL, ANY, NULL,
     "Save whenever an evaluation is the best so far, and keep that checkpoint: `best` links to it."},
    {"checkpoint", "save", MT_OUTPUT, MT_KEY_CHOICE, AT(checkpoint.save), "full", "full|weights", ANY, NULL,
     "Save weights and training state, or weights alone (in bf16, cannot be resumed)."},
    {"checkpoint", "frozen", MT_OUTPUT, MT_KEY_CHOICE, AT(checkpoint.frozen), "name", "name|copy", ANY, NULL,
     "Frozen tensors in full checkpoints: name those that are bf16 in the model's files by file and checksum (resuming "
     "verifies them, export copies them in), or copy them. Packed and other ones are copied; with adapters none is."},
    {"checkpoint", "on_signal", MT_OUTPUT, MT_KEY_CHOICE, AT(checkpoint.on_signal), "full",
     "full|weights|none", ANY, NULL, "What to save when stopped by a signal."},
    {"checkpoint", "time_limit", MT_OUTPUT, MT_KEY_DURATION, AT(checkpoint.time_limit), "0", NULL, ANY, NULL,
     "Save and stop with exit code 75 after this long, such as 11h30m, whatever the run is doing then; 0 = no limit."},
    {"checkpoint", "save_deadline", MT_OUTPUT, MT_KEY_DURATION, AT(checkpoint.save_deadline), "10m", NULL, ANY, NULL,
     "How long the last save of a run is retried if it fails, as on a full disk, before weights alone are saved."},
    {"checkpoint", "shard_size", MT_OUTPUT, MT_KEY_BYTES, AT(checkpoint.shard_size), "5GB", NULL, 1e4, 1e15,
     NULL, "Largest file of exported weights."},

    {"log", "every", MT_OUTPUT, MT_KEY_COUNT, AT(log.every), "1", NULL, 1, 1e9, NULL,
     "Steps between progress lines."},
    {"log", "jsonl", MT_OUTPUT, MT_KEY_BOOL, AT(log.jsonl), "on", NULL, ANY, NULL,
     "Write metrics.jsonl to the output folder."},
    {"log", "csv", MT_OUTPUT, MT_KEY_BOOL, AT(log.csv), "off", NULL, ANY, NULL, "Write metrics.csv; of mixtures of experts metrics-layers.csv, too."},
    {"log", "tensorboard", MT_OUTPUT, MT_KEY_BOOL, AT(log.tensorboard), "off", NULL, ANY, NULL,
     "Write TensorBoard events."},
    {"log", "exec", MT_OUTPUT, MT_KEY_STRING, AT(log.exec), "", NULL, ANY, NULL,
     "A shell command that gets each record of metrics.jsonl as a line on its standard input, for trackers and notifications. "
     "It never holds the run up, and ends with it, as does what it starts."},
    {"log", "progress", MT_OUTPUT, MT_KEY_CHOICE, AT(log.progress), "auto", "auto|on|off", ANY, NULL,
     "Progress lines on standard error, and the status of phases that take long."},

    {"device", "kind", MT_MACHINE, MT_KEY_CHOICE, AT(device.kind), "auto", "auto|cuda|cpu", ANY, NULL,
     "Compute device; auto is a GPU if there is one that this build can use, else the CPU."},
    {"device", "index", MT_MACHINE, MT_KEY_COUNT, AT(device.index), "0", NULL, 0, 1024, NULL,
     "Which GPU; with several (device.gpus), the first."},
    {"device", "gpus", MT_MACHINE, MT_KEY_STRING, AT(device.gpus), "1", NULL, ANY, NULL,
     "Devices that take the layers in turn: micro-batches follow each other from one to the next through host memory. The "
     "result has the same bits for any number. A number from 1 to 8 is a count from device.index on, `all` takes all from "
     "there on, index:0,2 and GPU-...,GPU-... (nvidia-smi -L) name GPUs, of one product, one by one. Each has device_budget. On "
     "the cpu device it is a number of devices in host memory."},
    {"device", "map", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.map), "auto", MT_MAP_NAMES, ANY, NULL,
     "How several devices share a step. units: they take the layers in turn. data: they share the groups of micro-batches "
     "(train.groups, at least as many), and each loads all weights. auto: data for mixtures of experts and adapters if there "
     "are enough groups, else units. The result has the same bits with both."},
    {"device", "expert_streams", MT_PLACEMENT, MT_KEY_COUNT, AT(placement.expert_streams), "auto", NULL, 1, 4,
     NULL, "GPU: streams in which a mixture's experts run side by side, so that small products leave no multiprocessor idle. 1: one "
     "after the other. auto: 3, or 1 where their memory is missing."},
    {"device", "link_gbps", MT_MACHINE, MT_KEY_REAL, AT(device.link_gbps), "0", NULL, 0, 1e6, NULL,
     "cpu device: throttle copies in each direction to this many GB/s, to rehearse a PCIe link; 0 = off."},
    {"device", "cpu_threads", MT_MACHINE, MT_KEY_COUNT, AT(placement.threads), "auto", NULL, 1, 4096, NULL,
     "Threads of compute and of the optimizer; auto is one for each core that the process may use."},
    {"device", "numa", MT_MACHINE, MT_KEY_WORD, AT(device.numa), "auto", "auto|system", ANY, NULL,
     "Placement of host memory on a machine with several NUMA nodes: auto spreads it over all that have memory and cores "
     "for the process, so that copies use all memory channels and the optimizer's threads those of their own node "
     "(unless numactl has set a policy); system leaves it to the kernel."},

    {"cluster", "states", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.host_states), "owned", MT_HOST_STATES_NAMES, ANY, NULL,
     "With several hosts (mpirun): owned: each part of the model has one host that keeps its masters, moments and gradient, updates "
     "it and sends the others its new weights, so that each keeps 2 + 12/hosts bytes a parameter instead of 14, and updates and "
     "writes to its drives one part in hosts; a lost host ends the run at its last checkpoint. whole: every host keeps all, and "
     "the first saves the last whole step when another is lost. The result has the same bits with both."},
    {"cluster", "memory", MT_MACHINE, MT_KEY_LIST, AT(cluster.memory), "", NULL, ANY, NULL,
     "With several hosts (mpirun): host memory that each may use, the first one's first, as in 256GiB, 64GiB. Empty: memory.host_budget of "
     "what each has. Hosts own equal parts of the states, unless one has too little memory for that: then those with more own more."},
    {"cluster", "drives", MT_MACHINE, MT_KEY_LIST, AT(cluster.drives), "", NULL, ANY, NULL,
     "With several hosts (mpirun): what each may put in memory.nvme_paths, the first one's first, as in 2TB, 500GB, 0GB. Empty: what is "
     "free there. Hosts own equal parts of the states, unless one has too little for that: then those with more own more."},
    {"cluster", "timeout", MT_MACHINE, MT_KEY_DURATION, AT(cluster.timeout), "5m", NULL, ANY, NULL,
     "With several hosts (mpirun): how long one waits for another before it takes that host for lost. Then the first saves what the "
     "last whole step left, and all end. It must be longer than the slowest host takes for a step."},
    /* clang-format on */
};

/* Where the keys of optimizers are: after optimizer.type. */
static size_t first_own(void)
{
    size_t i = 0;
    while (keys[i].offset != AT(optimizer.type))
        i++;
    return i + 1;
}

size_t mt_n_keys(void)
{
    return MT_ARRAY_LEN(keys) + mt_optimizer_n_slots();
}

const struct mt_key *mt_key_at(size_t i)
{
    size_t own = first_own(), n = mt_optimizer_n_slots();
    return i < own ? &keys[i] : i < own + n ? &mt_optimizer_slot(i - own)->key : &keys[i - n];
}

size_t mt_key_index(const struct mt_key *key)
{
    size_t i = 0;
    while (mt_key_at(i) != key)
        i++;
    return i;
}

const struct mt_key *mt_key_find(const char *section, const char *name)
{
    for (size_t i = 0; i < mt_n_keys(); i++)
        if (!strcmp(mt_key_at(i)->section, section) && !strcmp(mt_key_at(i)->name, name))
            return mt_key_at(i);
    return NULL;
}

const char *mt_key_suggest(const char *section, const char *name)
{
    const char *best = NULL;
    int least = 4; /* edits; beyond that it is another word */
    for (size_t i = 0; i < mt_n_keys(); i++) {
        if (section && strcmp(mt_key_at(i)->section, section))
            continue;
        const char *word = section ? mt_key_at(i)->name : mt_key_at(i)->section;
        int d = mt_edit_distance(word, name);
        if (d < least && d < (int)strlen(word)) {
            least = d;
            best = word;
        }
    }
    return best;
}
