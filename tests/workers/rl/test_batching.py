from __future__ import annotations

import pytest

from workers.rl.batching import (
    Batch,
    Denominator,
    denominator,
    micro_batch_chunks,
    micro_batch_indices,
    micro_batches,
    split_updates,
)


def batch(groups: list[int], lengths: list[int], keep: list[bool] | None = None) -> Batch:
    return Batch(
        groups=groups,
        prompts=[(group + 1,) for group in groups],
        completions=[tuple(range(length)) for length in lengths],
        engine_logprobs=[[-1.0] * length for length in lengths],
        advantages=[[float(index)] * length for index, length in enumerate(lengths)],
        keep=keep or [True] * len(groups),
    )


def test_denominator_counts_kept_samples_and_adds_over_workers() -> None:
    total = denominator(batch([0, 0, 1], [2, 3, 7], [True, False, True]), max_tokens=9)
    assert total == Denominator(tokens=9, sequences=2, max_tokens=9)
    assert total + total == Denominator(18, 4, 9)
    with pytest.raises(ValueError, match="different max_tokens"):
        total + Denominator(1, 1, 5)


def test_denominator_counts_sampled_tokens_and_the_sequences_that_have_some() -> None:
    marks = [[True, False], [False] * 3, [False, True, True, True, True, True, False]]
    whole = Batch(**vars(batch([0, 0, 1], [2, 3, 7])) | {"sampled": marks})
    assert whole.trained == [0, 2]
    assert denominator(whole, max_tokens=9) == Denominator(tokens=6, sequences=2, max_tokens=9)
    assert whole.select([2]).sampled == marks[2:]


def test_updates_hold_whole_groups() -> None:
    whole = batch([2, 0, 1, 0, 2, 1], [1, 2, 3, 4, 5, 6])
    parts = split_updates(whole, 2)
    assert [part.groups for part in parts] == [[0, 0], [2, 1, 2, 1]]
    assert [[row[0] for row in part.advantages] for part in parts] == [[1.0, 3.0], [0.0, 2.0, 4.0, 5.0]]
    with pytest.raises(ValueError, match="3 groups cannot be split into 4"):
        split_updates(whole, 4)


def test_micro_batches_keep_groups_together_and_lose_nothing() -> None:
    whole = batch([1, 0, 1, 0, 0], [3, 2, 9, 4, 4])
    indices = micro_batch_indices(whole, 2)
    assert indices == [[3, 4], [1, 2], [0]]
    assert [part.groups for part in micro_batches(whole, 2)] == [[0, 0], [0, 1], [1]]
    assert micro_batch_indices(whole, 2) == indices


def test_chunks_of_groups_do_not_wait_for_others() -> None:
    assert micro_batch_chunks([4, 0, 2, 0, 6, 8], size=9, group_size=4) == [[0, 2], [4, 6], [8]]
    assert micro_batch_chunks([1, 0], size=8, group_size=16) == [[0], [1]]
    assert micro_batch_chunks([], size=8, group_size=4) == []
    whole = batch([2, 0, 1, 0, 1, 2], [3, 4, 2, 9, 1, 5])
    chunks = micro_batch_chunks(whole.groups, size=4, group_size=2)
    made = [micro for chunk in chunks for micro in micro_batches(whole.of_groups(chunk), 4)]
    early = micro_batches(whole.select([5, 0]).of_groups(chunks[1]), 4)
    assert [micro.groups for micro in made] == [[0, 0, 1, 1], [2, 2]]
    assert early == made[1:]


def test_micro_batches_are_bounded_in_padded_tokens() -> None:
    # One token of prompt each. Three of one group: 1 + 3 x (1 + 4) = 16; with the next group 2 + 4 x 5 = 22.
    whole = batch([0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 1, 40])
    assert micro_batch_indices(whole, 8, tokens=22) == [[0, 1, 2, 3], [4], [5]]
    assert micro_batch_indices(whole, 8, tokens=21) == [[0, 1, 2], [3, 4], [5]]
    assert micro_batch_indices(whole, 8, tokens=1) == [[0], [1], [2], [3], [4], [5]]
    assert max(map(len, micro_batch_indices(batch([0] * 64, [500] * 64), 64))) == 16


def test_old_and_reference_logprobs_travel_with_their_samples() -> None:
    whole = batch([0, 1], [1, 2]).with_logprobs(old=[[-1.0], [-2.0, -3.0]])
    assert whole.with_logprobs(reference=[[0.0], [0.0, 0.0]]).select([1]).old_logprobs == [[-2.0, -3.0]]
    assert whole.select([1]).reference_logprobs is None


def test_bad_batches_are_refused() -> None:
    good = vars(batch([0, 1], [1, 2]))
    with pytest.raises(ValueError, match="one entry per sample"):
        Batch(**good | {"keep": [True]})
    with pytest.raises(ValueError, match="sample 1: 2 tokens but 1 engine_logprobs"):
        Batch(**good | {"engine_logprobs": [[0.0], [0.0]]})
    with pytest.raises(ValueError, match="sample 1: 2 tokens but 1 sampled"):
        Batch(**good | {"sampled": [[True], [True]]})
    with pytest.raises(ValueError, match="sample 0: prompt and completion need at least one token"):
        Batch(**good | {"completions": [(), (1, 2)], "engine_logprobs": [[], [0.0, 0.0]]})
