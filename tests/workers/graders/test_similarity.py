"""Similarities against numbers worked out by hand.

ROUGE and BLEU were compared once with Google's rouge-score and with sacrebleu, to six places: the pairs of
``KNOWN`` are from there.
"""

from __future__ import annotations

import math
from typing import get_args

import pytest

from workers.graders.run import GradeInput, grade_batch
from workers.graders.similarity import METRICS
from workers.spec import TextSimilarityGrader

CAT = "the cat sat on the mat", "the cat is on the mat"
PARIS = "Paris is the capital of France.", "The capital of France is Paris."
SHORT = "one two", "one two three four five six"
KNOWN = [
    (CAT, "rouge_1", 0.833333),
    (CAT, "rouge_2", 0.6),
    (CAT, "rouge_3", 0.25),
    (CAT, "rouge_l", 0.833333),
    (CAT, "bleu", 0.379918),
    (PARIS, "rouge_1", 1.0),
    (PARIS, "rouge_2", 0.6),
    (PARIS, "rouge_3", 0.5),
    (PARIS, "rouge_l", 0.666667),
    (PARIS, "bleu", 0.290715),
    (SHORT, "rouge_2", 0.333333),
    (SHORT, "rouge_l", 0.5),
    (SHORT, "bleu", 0.135335),
]


def score(metric: str, text: str, reference: str) -> float:
    grader = TextSimilarityGrader(
        type="text_similarity",
        reference="{{item.answer}}",
        evaluation_metric=metric,  # type: ignore[arg-type]
    )
    (result,) = grade_batch(grader, [GradeInput({"answer": reference}, text)])
    assert result.score is not None
    return result.score


def test_there_is_a_function_for_every_metric() -> None:
    assert set(get_args(TextSimilarityGrader.model_fields["evaluation_metric"].annotation)) == set(METRICS)


@pytest.mark.parametrize(("texts", "metric", "expected"), KNOWN)
def test_as_the_metrics_own_programs_have_it(texts: tuple[str, str], metric: str, expected: float) -> None:
    assert score(metric, *texts) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("metric", "text", "reference", "expected"),
    [
        # 18 n-grams in each (6 + 5 + 4 + 3), 9 of them in both (5 + 3 + 1 + 0).
        ("gleu", *CAT, 9 / 18),
        # Five of six words match, in two chunks: F = 5/6, penalty = 0.5 (2/5)^3.
        ("meteor", *CAT, 5 / 6 * (1 - 0.5 * (2 / 5) ** 3)),
        # The stems match: one chunk of one word.
        ("meteor", "running", "runs", 0.5),
        # A synonym does not, for WordNet is not looked into.
        ("meteor", "car", "automobile", 0.0),
        # Brevity penalty alone: one word of three, and it matches.
        ("bleu", "Paris", "Paris of France", math.exp(1 - 3)),
        ("rouge_4", "a b c d e", "a b c d x", 0.5),
        ("rouge_5", "a b c d e", "A, B, C, D, E!", 1.0),
        ("rouge_1", "the the the", "the cat", 0.4),
        ("rouge_1", "日本 語", "日本 人", 0.5),
        ("rouge_l", "a b c d e f g", "a c e g b d f", 4 / 7),
    ],
)
def test_by_hand(metric: str, text: str, reference: str, expected: float) -> None:
    assert score(metric, text, reference) == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_lies_between_nothing_and_one(metric: str) -> None:
    same = "a long enough sentence to have five words in a row"
    assert score(metric, same, same) == pytest.approx(1.0, abs=1e-3)  # meteor: 1 - 0.5 / 11^3
    assert score(metric, "nothing", "äöü 42") == pytest.approx(0.0, abs=0.01)
    assert score(metric, "", same) == score(metric, same, "") == 0.0
    assert score(metric, "", "") == (1.0 if metric == "fuzzy_match" else 0.0)
