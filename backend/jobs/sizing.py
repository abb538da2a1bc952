"""How much device memory a job asks for: estimates for the torch engine, on the safe side. Pure.

weights  what a device holds once for all jobs on the same base: an engine and a trainer, two processes with
         a copy of the base weights each; a job that learns from the data's own completions has no engine.
         The engine multiplies by a second, re-ordered copy of a tied head when it computes in bf16 on a CPU
         (https://arxiv.org/abs/1608.05859 on tying).
run      what comes on top, per device:
         LoRA  adapter, gradient and two Adam moments, fp32: 16 bytes a parameter; in the type of the
               weights, the adapter joined for a pass, in the trainer and in the engine
         full  the same four for every parameter (the master copy in place of an adapter); in the type of
               the weights, the copy that the trainer rounds for a pass and the one that comes to the engine
               while the old one is still there
         reference  of a job that starts from a checkpoint and compares with it: one more copy of what is
               trained, in the type of the weights. Others compare with the base weights
         value  PPO's head over the hidden states of a micro-batch, in fp32
         KV    a key and a value per layer and token of every sequence of the device's rollout, up to what
               the engine's cache holds
         acts  of one micro-batch: 34 values per layer, token and hidden unit at 16 bits plus five per pair of
               attended tokens and head (https://arxiv.org/abs/2205.05198, section 4.1). Above
               ``ACTIVATION_BYTES`` the trainer computes blocks again: then one block comes on top.
               The logits of ``LOGIT_ROWS`` positions with their softmax and gradient in fp32; full
               fine-tuning keeps all probabilities for the head's gradient; with an entropy bonus, twice

``auto`` precision is sized as fp32, for the device is not known yet. Every sequence is taken to be as long as
the longest prompt, which the validation measures, and a whole completion. Until then a guess stands in: one
token for three bytes of the mean row, and the chat template's own.
"""

from __future__ import annotations

import math

from workers.models.config import ModelConfig
from workers.models.limits import ACTIVATION_BYTES, KV_TOKENS, LOGIT_ROWS
from workers.spec import JobSpec, LoRA, RLConfig

FP32 = 4
TRAINED_COPIES = 4  # weights, gradient, two moments
#: An engine or a trainer before it has loaded anything: the interpreter, torch, the tokenizer.
PROCESS_BYTES = 250 << 20
TEMPLATE_TOKENS = 64
BYTES_PER_TOKEN = 3
BYTES_PER_VALUE = {"bf16": 2, "fp32": 4, "auto": 4}


def weights_bytes(*, model: ModelConfig, parameters: int, rl: RLConfig) -> int:
    value = BYTES_PER_VALUE[rl.precision]
    process = parameters * value + PROCESS_BYTES
    if not rl.method.rolls_out:
        return process
    second_head = model.vocab * model.hidden * value if model.tied and rl.precision == "bf16" else 0
    return 2 * process + second_head


def weights_key(*, model_key: str, job_key: str, spec: JobSpec) -> str:
    """What residents load: LoRA jobs share a base at one precision, a full fine-tune has its own."""
    return f"{model_key}@{spec.rl.precision}" if isinstance(spec.rl.tuning, LoRA) else job_key


def run_bytes(
    *, model: ModelConfig, parameters: int, rl: RLConfig, prompt_tokens: int, starts: bool = False
) -> int:
    """``starts``: from a checkpoint."""
    trained = lora_parameters(model, rl.tuning) if isinstance(rl.tuning, LoRA) else parameters
    tokens = min(model.context, prompt_tokens + rl.sampling.max_tokens)
    value = BYTES_PER_VALUE[rl.precision]
    copies = pass_copies(rl) + (1 if starts and rl.needs_reference else 0)
    return (
        trained * (TRAINED_COPIES * FP32 + copies * value)
        + cached_tokens(rl, tokens) * kv_bytes_per_token(model, value)
        + activation_bytes(model, micro_batch(rl), tokens, value)
        + logit_bytes(model, rl, tokens)
        + value_bytes(model, rl, tokens)
    )


def pass_copies(rl: RLConfig) -> int:
    """The trainer's of a pass, and the engine's."""
    return 2 if rl.method.rolls_out else 1


def cached_tokens(rl: RLConfig, tokens: int) -> int:
    return min(sequences_per_device(rl) * tokens, KV_TOKENS) if rl.method.rolls_out else 0


def micro_batch(rl: RLConfig) -> int:
    """Sequences of a pass; pairs stay together."""
    return max(rl.micro_batch_size, 2) if rl.method.objective == "preference" else rl.micro_batch_size


def value_bytes(model: ModelConfig, rl: RLConfig, tokens: int) -> int:
    if rl.method.baseline != "value":
        return 0
    head = (model.hidden + 1) * TRAINED_COPIES
    return (head + micro_batch(rl) * tokens * model.hidden) * FP32


def lora_parameters(model: ModelConfig, lora: LoRA) -> int:
    """rank x (inputs + outputs) for each target of each layer."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = {
        "q_proj": model.hidden + query,
        "k_proj": model.hidden + key,
        "v_proj": model.hidden + key,
        "o_proj": query + model.hidden,
        "gate_proj": model.hidden + model.intermediate,
        "up_proj": model.hidden + model.intermediate,
        "down_proj": model.intermediate + model.hidden,
    }
    return model.layers * lora.rank * sum(sizes[target] for target in lora.targets)


def sequences_per_device(rl: RLConfig) -> int:
    """Whole groups go to a device."""
    return math.ceil(rl.prompts_per_step / rl.devices) * rl.group_size


def guessed_prompt_tokens(file_bytes: int, rows: int) -> int:
    return math.ceil(file_bytes / rows / BYTES_PER_TOKEN) + TEMPLATE_TOKENS


def kv_bytes_per_token(model: ModelConfig, value: int) -> int:
    return 2 * model.layers * model.kv_heads * model.head_dim * value


def activation_bytes(model: ModelConfig, sequences: int, tokens: int, value: int) -> int:
    linear = 34 * sequences * tokens * model.hidden * value // 2
    attention = 5 * sequences * tokens * tokens * model.heads * value // 2
    block = linear + attention
    kept = model.layers * block
    return kept if kept <= ACTIVATION_BYTES else ACTIVATION_BYTES + block


def logit_bytes(model: ModelConfig, rl: RLConfig, tokens: int) -> int:
    row = model.vocab * FP32
    kept = 0 if isinstance(rl.tuning, LoRA) else micro_batch(rl) * tokens * row
    tables = 2 if rl.loss.entropy_coef > 0 else 1
    return (2 + tables) * LOGIT_ROWS * row + tables * kept
