"""Text similarity, each metric in [0, 1], by rapidfuzz and nltk.

Words are runs of letters and digits and, apart, of other marks, as they are written for BLEU and GLEU
(nltk's ``wordpunct_tokenize``); ROUGE compares letters and digits regardless of case, in any script. METEOR
matches words and their Porter stems: synonyms, which need WordNet's data, are not looked up.
Two empty texts are alike by ``fuzzy_match``; by all others a text without words is like nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

Words = Sequence[str]
WORD = re.compile(r"\w+")


def fuzzy_match(text: str, reference: str) -> float:
    """1 - (insertions + deletions) / (both lengths): rapidfuzz's ``ratio``, scaled."""
    return fuzz.ratio(text, reference) / 100


# nltk takes a third of a second to import, and most graders never need it: it is imported where it is used.


def bleu(text: str, reference: str) -> float:
    """Sentence BLEU-4 (https://aclanthology.org/P02-1040), NIST's smoothing of n-grams that never match; of
    fewer than four words up to the n-grams there are.
    """
    from nltk.tokenize import wordpunct_tokenize
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    return float(
        sentence_bleu(
            [wordpunct_tokenize(reference)],
            wordpunct_tokenize(text),
            smoothing_function=SmoothingFunction().method3,
            auto_reweigh=True,
        )
    )


def gleu(text: str, reference: str) -> float:
    """The lower of precision and recall of all 1- to 4-grams (https://arxiv.org/abs/1609.08144)."""
    from nltk.tokenize import wordpunct_tokenize
    from nltk.translate.gleu_score import sentence_gleu

    return float(sentence_gleu([wordpunct_tokenize(reference)], wordpunct_tokenize(text)))


def meteor(text: str, reference: str) -> float:
    """METEOR of words and stems, without synonyms (https://aclanthology.org/W07-0734)."""
    from nltk.tokenize import wordpunct_tokenize
    from nltk.translate.meteor_score import single_meteor_score

    return float(
        single_meteor_score(wordpunct_tokenize(reference), wordpunct_tokenize(text), wordnet=NoSynonyms())
    )


class NoSynonyms:
    """In WordNet's place: knows no word."""

    def synsets(self, word: str) -> list[object]:
        return []


def rouge_n(text: str, reference: str, n: int) -> float:
    """F1 of n-grams, each counted as often as it stands in both (https://aclanthology.org/W04-1013)."""
    mine, theirs = ngrams(words(text), n), ngrams(words(reference), n)
    return f1((mine & theirs).total(), mine.total(), theirs.total())


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (https://aclanthology.org/W04-1013)."""
    mine, theirs = words(text), words(reference)
    return f1(LCSseq.similarity(mine, theirs), len(mine), len(theirs))


def words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def ngrams(words: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))


def f1(common: int, mine: int, theirs: int) -> float:
    return 2 * common / (mine + theirs) if common else 0.0


def rouge(n: int) -> Callable[[str, str], float]:
    return lambda text, reference: rouge_n(text, reference, n)


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "meteor": meteor,
    **{f"rouge_{n}": rouge(n) for n in range(1, 6)},
    "rouge_l": rouge_l,
}
