"""The pages of the algorithms under ``docs/algorithms``, made from the table and the code's own docstrings.

python -m infra.docs            write them
python -m infra.docs --check    say which are not what the code says
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from workers.rl import advantages, averages, kl, losses, objective
from workers.spec import ALGORITHMS, Algorithm, AlgorithmName, Loss, Optimizer, RLConfig, Sampling, Value

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "algorithms"

BASELINES: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "group": (advantages.group_advantages,),
    "leave_one_out": (advantages.leave_one_out_advantages,),
    "none": (advantages.token_advantages,),
    "value": (advantages.value_advantages, advantages.gae),
}
OBJECTIVES: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "clip": (losses.clipped_policy_loss,),
    "cut": (losses.cut_policy_loss,),
    "likelihood": (objective.likelihood,),
    "preference": (losses.preference_loss,),
}
#: Settings about the machine, or of every job alike; the new-job form and the API describe them.
ELSEWHERE = {
    *("algorithm", "steps", "prompts_per_step", "shuffle", "micro_batch_size", "precision", "devices"),
    *("checkpoint_every", "keep_checkpoints", "sample_groups", "tuning", "mode"),
}
GROUPS: Mapping[str, type[BaseModel]] = {
    "sampling": Sampling,
    "optimizer": Optimizer,
    "loss": Loss,
    "value": Value,
}


def pages() -> dict[Path, str]:
    """The text of each page by its path."""
    made = {FOLDER / f"{name}.md": page(algorithm) for name, algorithm in ALGORITHMS.items()}
    return {FOLDER / "README.md": contents()} | made


def contents() -> str:
    lines = [
        "# Algorithms",
        "",
        "`rl.algorithm` names one. Each page gives the formula, how it is averaged, and the defaults;",
        "all of it is made from the code by `python -m infra.docs`.",
        "",
        "| `rl.algorithm` | | paper |",
        "|---|---|---|",
    ]
    rows = [
        f"| [`{name}`]({name}.md) | {algorithm.title} | {', '.join(map(link, algorithm.papers))} |"
        for name, algorithm in ALGORITHMS.items()
    ]
    return "\n".join([*lines, *rows, ""])


def page(algorithm: Algorithm) -> str:
    parts = [f"# {algorithm.title}", " ".join(["Papers:", *map(link, algorithm.papers)])]
    if algorithm.rolls_out:
        parts += section("Advantage", *BASELINES[algorithm.baseline])
        parts.append(normalization(algorithm))
    parts += section("Loss", *OBJECTIVES[algorithm.objective], *ratios(algorithm))
    parts += section("Average", averages.divisor)
    if "overlong_buffer" in algorithm.defaults and algorithm.name == "dapo":
        parts += section("Reward near the longest length", advantages.shaped)
        parts += section("Groups that teach nothing", advantages.teaches)
    if algorithm.rolls_out:
        parts += section("Divergence", kl)
        parts += section("Who sampled", losses.importance_weights)
    parts += ["## Settings", settings(algorithm), "## A job", example(algorithm.name)]
    return "\n\n".join(parts) + "\n"


def ratios(algorithm: Algorithm) -> tuple[Callable[..., Any], ...]:
    return (losses.log_ratios,) if algorithm.rolls_out else ()


def normalization(algorithm: Algorithm) -> str:
    default = "on" if algorithm.defaults.get("normalize_advantage") else "off"
    over = f"`normalize_advantage` divides by the deviation over the {algorithm.scope}"
    return f"{over}; it is {default} by default."


def section(title: str, *sources: Any) -> list[str]:
    return [f"## {title}", *(markdown(inspect.getdoc(source) or "") for source in sources)]


def markdown(docstring: str) -> str:
    """Double backquotes become single, addresses links; indented lines stay as code."""
    text = re.sub(r"``([^`]+)``", r"`\1`", docstring)
    return re.sub(r"(?<![<])(https?://[^\s,)]+)", r"<\1>", text)


def link(url: str) -> str:
    return f"[{url.removeprefix('https://arxiv.org/abs/')}]({url})"


def settings(algorithm: Algorithm) -> str:
    """Every field that has an effect, what it is when it is left out, and who says so."""
    config = RLConfig(algorithm=algorithm.name)
    rows = []
    for path, description in fields():
        if path in algorithm.ignores or path.split(".")[0] in algorithm.ignores:
            continue
        owner: Any = config
        for name in path.split("."):
            owner = getattr(owner, name)
        source = "the algorithm" if path in algorithm.defaults else ""
        rows.append(f"| `rl.{path}` | `{json.dumps(plain(owner))}` | {source} | {description} |")
    return "\n".join(["| field | default | of | |", "|---|---|---|---|", *rows])


def fields() -> Iterator[tuple[str, str]]:
    """Dotted paths below ``rl`` and what the schema says of them."""
    for name, field in RLConfig.model_fields.items():
        if name in ELSEWHERE:
            continue
        if name not in GROUPS:
            yield name, field.description or ""
            continue
        for inner, below in GROUPS[name].model_fields.items():
            yield f"{name}.{inner}", below.description or ""


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def example(name: AlgorithmName) -> str:
    method = {"sft": "supervised", "dpo": "dpo"}.get(name)
    body: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "training_file": "arithmetic"}
    if method is None:
        body["rl"] = {"algorithm": name}
    else:
        body |= {"training_file": "file-…", "method": {"type": method}}
    return f"```json\n{json.dumps(body, indent=2, ensure_ascii=False)}\n```"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if asked.check:
        for path in stale:
            print(f"docs/algorithms/{path.name} is not what the code says: run python -m infra.docs")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
