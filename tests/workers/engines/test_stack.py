from __future__ import annotations

import pytest
import torch

from tests.workers.engines.adapters import logits, random_adapter
from workers.engines.decoder import Adapters, head_logits, hidden_states
from workers.engines.lora import join
from workers.engines.packed import pack, packed_attention
from workers.engines.stack import Rows, Stack
from workers.engines.weights import Weights

TOKENS = [3, 9, 22, 7, 31, 40, 5, 5, 60]


@pytest.fixture(scope="module")
def adapters(tiny: Weights) -> list[Adapters | None]:
    """Different ranks and targets, and a run without any."""
    config, dtype = tiny.config, torch.float32
    return [
        join(config, random_adapter(config, 1, rank=4), 2.0, dtype),
        None,
        join(config, random_adapter(config, 2, rank=3, targets=["k_proj", "up_proj"]), 0.5, dtype),
        join(config, random_adapter(config, 3, rank=2), 1.0, dtype),
    ]


@pytest.mark.parametrize(
    "lengths", [[5, 5, 5, 5], [1, 9, 4, 3], [300, 1, 2, 1], [4, 3], [0, 0, 6, 2], [5, 0, 0, 3]]
)
def test_every_token_has_its_own_adapter(
    tiny: Weights, adapters: list[Adapters | None], lengths: list[int]
) -> None:
    prompts = [(TOKENS * 40)[:length] for length in lengths if length]
    wanted = [adapter for adapter, length in zip(adapters, lengths, strict=False) if length]
    additions = Stack(tiny.config, adapters).additions(wanted, [len(prompt) for prompt in prompts])
    assert additions is not None
    batch = pack(prompts, [], tiny.device)
    with torch.no_grad():
        hidden = hidden_states(tiny, batch.tokens_T, batch.positions_T, packed_attention(batch), additions)
        found = head_logits(tiny, hidden).split([len(prompt) for prompt in prompts])
    for prompt, adapter, ours in zip(prompts, wanted, found, strict=True):
        torch.testing.assert_close(ours, logits(tiny, prompt, adapter), atol=1e-5, rtol=1e-5)


def test_one_long_run_is_not_padded_for() -> None:
    assert Rows.of([30, 31]).batched
    assert not Rows.of([300, 1, 1]).batched


def test_idle_runs_are_not_computed_for_where_they_are_half() -> None:
    assert Rows.of([3, 0, 3]).batched
    rows = Rows.of([3, 0, 0, 2])
    assert not rows.batched
    assert rows.spans == [(0, slice(0, 3)), (3, slice(3, 5))]


def test_new_adapters_take_the_places_of_old_ones(tiny: Weights, adapters: list[Adapters | None]) -> None:
    def new(seed: int, **how: object) -> Adapters:
        return join(tiny.config, random_adapter(tiny.config, seed, **how), 1.0, torch.float32)

    changed = [new(7, rank=2, targets=["q_proj"]), new(8, rank=4), None, adapters[3]]
    stack = Stack(tiny.config, adapters)
    assert stack.renew(changed)
    fresh = Stack(tiny.config, changed)
    ours, theirs = (one.additions([changed[0], changed[1], changed[3]], [2, 3, 1]) for one in (stack, fresh))
    assert ours is not None and theirs is not None
    x, y = torch.randn(6, tiny.config.hidden), torch.randn(6, tiny.layers[0].qkv.shape[0])
    torch.testing.assert_close(ours[0]["qkv"].added(y.clone(), x), theirs[0]["qkv"].added(y.clone(), x))
    assert not stack.renew([new(9, rank=64), *changed[1:]]), "wider than any before"
    assert not stack.renew(changed[:3]), "another number of runs"


def test_a_stack_serves_what_it_holds(tiny: Weights, adapters: list[Adapters | None]) -> None:
    first, none, second, third = adapters
    stack = Stack(tiny.config, adapters)
    assert stack.additions([first, second], [2, 3]) is not None
    assert stack.additions([second, first], [2, 3]) is None
    assert (
        stack.additions([join(tiny.config, random_adapter(tiny.config, 1), 2.0, torch.float32)], [1]) is None
    )
    assert stack.additions([first, third], [2, 3]) is not None
    assert stack.additions([none, second, third], [2, 3, 1]) is not None


def test_rounding_does_not_depend_on_the_company(tiny: Weights) -> None:
    config, dtype = tiny.config, torch.bfloat16
    pair = [join(config, random_adapter(config, seed), 2.0, dtype) for seed in (1, 2)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, config.hidden, generator=generator).to(dtype)
    y = torch.randn(8, 2 * config.intermediate, generator=generator).to(dtype)
    alone = pair[0][0]["gate_up"].added(y[:5].clone(), x[:5])
    for others in (5, 3):
        count = 5 + others
        xs, ys = (torch.cat([tensor, tensor])[:count] for tensor in (x, y))
        additions = Stack(config, pair).additions(pair, [5, others])
        assert additions is not None
        fused = additions[0]["gate_up"].added(ys.clone(), xs)[:5]
        # Libraries may sum in another order; a second rounding to bf16 would show in every tenth number.
        assert (fused != alone).float().mean() < 0.01
