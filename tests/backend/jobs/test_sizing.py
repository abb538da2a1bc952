"""Memory estimates against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from backend.jobs import sizing
from tests.factories import TINY_CONFIG, spec
from workers.models.config import parse_config
from workers.models.limits import ACTIVATION_BYTES, KV_TOKENS, LOGIT_ROWS
from workers.spec import LoRA, RLConfig

# hidden 32, intermediate 64, 2 layers, 4 heads and 2 key-value heads of 8, vocabulary 64, context 128.
MODEL = parse_config(TINY_CONFIG)


def test_lora_parameters_are_rank_times_inputs_plus_outputs():
    # q: 32+32, k and v: 32+16 each, o: 32+32, gate and up: 32+64 each, down: 64+32; 2 layers of rank 4.
    assert sizing.lora_parameters(MODEL, LoRA(rank=4)) == 2 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert sizing.lora_parameters(MODEL, LoRA(rank=1, targets=("k_proj",))) == 2 * 48


def test_kv_bytes_are_two_vectors_a_layer():
    assert sizing.kv_bytes_per_token(MODEL, 2) == 2 * 2 * (2 * 8) * 2


def test_whole_groups_go_to_a_device():
    assert sizing.sequences_per_device(RLConfig(prompts_per_step=5, devices=2, group_size=4)) == 12


def test_a_sequence_is_no_longer_than_the_context():
    rl = RLConfig(sampling={"max_tokens": 28})
    sizes = [
        sizing.run_bytes(model=MODEL, parameters=9, rl=rl, prompt_tokens=tokens) for tokens in (99, 100, 101)
    ]
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_prompt_is_guessed_from_the_mean_row():
    assert sizing.guessed_prompt_tokens(file_bytes=1_000, rows=10) == 34 + 64


def test_activations_of_one_sequence_of_two_tokens():
    # linear 34*2*32, attention 5*2*2*4 halves of 4 bytes a layer.
    assert sizing.activation_bytes(MODEL, 1, 2, 4) == 2 * (34 * 2 * 32 * 2 + 5 * 4 * 4 * 2)


def test_above_the_bound_only_one_block_comes_on_top():
    block = 34 * 4096 * 128 * 32 * 2 + 5 * 4096 * 128 * 128 * 4 * 2
    assert 2 * block > ACTIVATION_BYTES
    assert sizing.activation_bytes(MODEL, 4096, 128, 4) == ACTIVATION_BYTES + block


def test_logits_are_in_memory_in_parts_and_kept_only_to_train_the_head():
    part = 3 * LOGIT_ROWS * 64 * 4
    assert sizing.logit_bytes(MODEL, RLConfig(), 10) == part
    full = RLConfig(tuning={"type": "full"}, micro_batch_size=2)
    assert sizing.logit_bytes(MODEL, full, 10) == part + 2 * 10 * 64 * 4


def test_the_cache_of_an_engine_is_bounded():
    sizes = [
        sizing.run_bytes(
            model=MODEL, parameters=9, rl=RLConfig(prompts_per_step=prompts, group_size=64), prompt_tokens=64
        )
        for prompts in (4, 8, 16)
    ]
    token = sizing.kv_bytes_per_token(MODEL, 4)
    assert sizes[1] - sizes[0] == (KV_TOKENS - 4 * 64 * 128) * token
    assert sizes[2] == sizes[1]


def test_an_engine_and_a_trainer_hold_the_weights_each():
    sizes = [
        sizing.weights_bytes(model=MODEL, parameters=10, rl=RLConfig(precision=kind))
        for kind in ("bf16", "fp32", "auto")
    ]
    assert sizes == [2 * 10 * 2 + 500 * 2**20, 2 * 10 * 4 + 500 * 2**20, 2 * 10 * 4 + 500 * 2**20]
    # 64 rows of 32 values of two bytes, once more.
    tied = parse_config({**TINY_CONFIG, "tie_word_embeddings": True})
    bf16 = RLConfig(precision="bf16")
    assert sizing.weights_bytes(model=tied, parameters=10, rl=bf16) - sizes[0] == 64 * 32 * 2


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_without_rollouts_there_is_no_engine_and_no_cache(algorithm):
    rl = RLConfig(algorithm=algorithm, precision="bf16")
    tied = parse_config({**TINY_CONFIG, "tie_word_embeddings": True})
    assert sizing.weights_bytes(model=tied, parameters=10, rl=rl) == 10 * 2 + 250 * 2**20
    adapter = sizing.lora_parameters(MODEL, LoRA())
    assert sizing.run_bytes(model=MODEL, parameters=9, rl=rl, prompt_tokens=40) == (
        adapter * (16 + 2) + sizing.activation_bytes(MODEL, 8, 104, 2) + sizing.logit_bytes(MODEL, rl, 104)
    )


def test_a_pair_is_never_split():
    small = RLConfig(algorithm="dpo", micro_batch_size=1)
    assert sizing.micro_batch(small) == 2
    assert sizing.micro_batch(RLConfig(algorithm="sft", micro_batch_size=1)) == 1


def run(starts: bool = False, **rl: Any) -> int:
    config = RLConfig(precision="fp32", **rl)
    return sizing.run_bytes(model=MODEL, parameters=1_000_000, rl=config, prompt_tokens=40, starts=starts)


def test_a_reference_of_its_own_is_held_by_who_starts_elsewhere_and_compares():
    full, penalty = {"type": "full"}, {"kl_beta": 0.1}
    for plain in ({"loss": penalty}, {"algorithm": "dpo"}):
        assert run(True, tuning=full, **plain) - run(tuning=full, **plain) == 1_000_000 * 4
        assert run(True, **plain) - run(**plain) == sizing.lora_parameters(MODEL, LoRA()) * 4
    # Nothing compares; or the base weights, which are there anyway, are the reference.
    assert run(True, tuning=full) == run(tuning=full) == run(tuning=full, loss=penalty)


def test_a_value_head_reads_the_hidden_states_of_a_micro_batch():
    # 32 weights and a bias in four copies; 8 sequences of 104 tokens of 32 numbers.
    assert run(algorithm="ppo") - run(algorithm="reinforce_pp") == (33 * 4 + 8 * 104 * 32) * 4


def test_an_entropy_bonus_keeps_the_slopes_too():
    bonus = RLConfig(tuning={"type": "full"}, micro_batch_size=2, loss={"entropy_coef": 0.01})
    assert sizing.logit_bytes(MODEL, bonus, 10) == 4 * LOGIT_ROWS * 64 * 4 + 2 * 2 * 10 * 64 * 4


def test_full_fine_tuning_holds_four_copies_of_everything_and_two_to_compute():
    sizes = {
        kind: sizing.run_bytes(
            model=MODEL, parameters=1_000_000, rl=RLConfig(tuning={"type": kind}), prompt_tokens=40
        )
        for kind in ("lora", "full")
    }
    adapter = sizing.lora_parameters(MODEL, LoRA())
    probabilities = 8 * 104 * 64 * 4  # of a micro-batch of 8 sequences of 104 tokens
    assert sizes["full"] - sizes["lora"] == (1_000_000 - adapter) * (16 + 2 * 4) + probabilities


def test_lora_jobs_share_a_base_and_full_ones_nothing():
    lora = sizing.weights_key(model_key="tiny", job_key="ftjob-1", spec=spec("tiny", "f"))
    assert lora == sizing.weights_key(model_key="tiny", job_key="ftjob-2", spec=spec("tiny", "f"))
    assert lora != sizing.weights_key(model_key="tiny", job_key="j", spec=spec("tiny", "f", precision="fp32"))
    full = spec("tiny", "f", tuning={"type": "full"})
    assert sizing.weights_key(model_key="tiny", job_key="ftjob-1", spec=full) == "ftjob-1"
