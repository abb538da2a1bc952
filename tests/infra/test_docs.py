from __future__ import annotations

from infra import docs
from workers.spec import ALGORITHMS


def test_the_pages_of_the_algorithms_are_what_the_code_says() -> None:
    assert docs.main(["--check"]) == 0


def test_every_algorithm_has_a_page_with_formula_average_defaults_and_paper() -> None:
    written = {path.stem: text for path, text in docs.pages().items()}
    for name, algorithm in ALGORITHMS.items():
        text = written[name]
        assert algorithm.papers[0] in text
        for part in ("## Loss", "## Average", "## Settings", "## A job"):
            assert part in text
        assert f"`{name}`" in written["README"]


def test_what_an_algorithm_ignores_is_no_setting_of_its_page() -> None:
    written = {path.stem: text for path, text in docs.pages().items()}
    assert "`rl.loss.clip_low`" not in written["cispo"]
    assert "`rl.loss.clip_high`" in written["cispo"]
    assert "`rl.value.lam`" in written["ppo"]
    assert "`rl.value.lam`" not in written["grpo"]
    assert "`rl.sampling.temperature`" not in written["sft"]
