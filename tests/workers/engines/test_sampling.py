from __future__ import annotations

import math

import numpy as np
import torch

from workers.engines.sampling import inverse_cdf, nucleus, sample, stream_state, uniforms


def test_inverse_cdf_follows_the_ids() -> None:
    mass = torch.tensor([[1.0, 0.0, 2.0, 1.0]]).expand(6, 4)
    at = torch.tensor([0.0, 0.2499, 0.25, 0.74, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(mass, at).tolist() == [0, 0, 2, 2, 3, 3]


def test_inverse_cdf_over_many_blocks_and_never_a_token_without_mass() -> None:
    mass = torch.zeros(3, 1000)
    mass[:, [10, 300, 999]] = 1.0
    at = torch.tensor([0.1, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(mass, at).tolist() == [10, 300, 999]
    mass[:, 999] = 0
    assert inverse_cdf(mass, at).tolist() == [10, 300, 300]


def test_logprobs_are_of_the_whole_softmax_at_the_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3)]]).repeat(3, 1)
    temperature, top_p = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.7, 1.0, 1.0])
    tokens, logprobs = sample(logits, temperature, top_p, torch.full((3,), 0.2, dtype=torch.float64))
    # top_p 0.7 leaves only the likelier token, whose probability is still told as 3/4; at temperature 1/2 the
    # odds are 1 : 9, so 0.2 falls to token 1; temperature 0 takes the likeliest and tells its probability at
    # 1.
    assert tokens.tolist() == [1, 1, 1]
    expected = torch.tensor([math.log(0.75), math.log(0.9), math.log(0.75)])
    torch.testing.assert_close(logprobs, expected)


def test_nucleus_keeps_the_smallest_sufficient_set() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    assert nucleus(mass, torch.tensor([0.74])).tolist() == [[0.0, 0.5, 0.0, 0.25]]
    assert (nucleus(mass, torch.tensor([0.76])) > 0).tolist() == [[False, True, True, True]]


def test_frequencies_match_the_distribution() -> None:
    count = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(count, 3)
    states = [stream_state((7, 0, 0, index)) for index in range(count)]
    numbers = torch.from_numpy(uniforms(states, [0] * count))
    tokens, _ = sample(logits, torch.ones(count), torch.ones(count), numbers)
    found = torch.bincount(tokens, minlength=3) / count
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / count)


def test_streams_are_stateless_and_distinct() -> None:
    names = [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0)]
    states = [stream_state(name) for name in names]
    assert len(set(states)) == len(names)
    together = uniforms(states, [5] * len(names))
    alone = np.concatenate([uniforms([state], [5]) for state in states])
    assert np.array_equal(together, alone)
    assert len(set(together)) == len(names)
    many = uniforms([states[0]] * 10_000, range(10_000))
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.05
