"""The jobs that the benchmark of multiplexing runs: four tenants' each, in four mixes.

a  alike, single-turn: 4 prompts x 4 samples a step, completions up to 32 tokens
b  the same with a long tail: one prompt of four asks for a story, up to 192 tokens
c  agents: up to 4 turns in a guessing game, whose answers take 0.2 to 2 s each
d  unlike: two base models, a full fine-tune, an asynchronous job, sizes that differ four times
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

MODEL = "SmolLM2-135M-Instruct"
HALF = "SmolLM2-half"

TOPICS = ("rivers", "cats", "music", "rain", "trees", "bread", "horses", "gardens", "winter", "books")
GRADER = {
    "type": "text_similarity",
    "name": "topic",
    "input": "{{sample.output_text}}",
    "reference": "{{item.topic}}",
    "evaluation_metric": "fuzzy_match",
}


@dataclass(frozen=True)
class Task:
    """What one tenant submits; ``rows`` is its data, ``body`` goes to the API as it is."""

    name: str
    rows: tuple[dict[str, Any], ...]
    body: dict[str, Any] = field(default_factory=dict)


def words(topic: str) -> dict[str, Any]:
    return _row("Follow the instruction.", f"Write one short sentence about {topic}.", topic=topic)


def story(topic: str) -> dict[str, Any]:
    return _row("You tell long stories.", f"Tell a long story about {topic}.", topic=topic)


def guess(number: int) -> dict[str, Any]:
    text = "I think of a number from 1 to 20. Guess it. Reply with one number only."
    return _row("Play the game.", text, number=number, topic=str(number))


def _row(system: str, user: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, **fields}


SHORT_ROWS = tuple(words(topic) for topic in TOPICS)
#: In the file's order, so that every step has three short prompts and one long.
TAILED_ROWS = tuple(
    row
    for place in range(4)
    for row in (*map(words, TOPICS[place * 2 : place * 2 + 3]), story(TOPICS[place]))
)
GAME_ROWS = tuple(guess(number) for number in range(1, 21))


def rl(steps: int, **changes: Any) -> dict[str, Any]:
    """A step of 4 x 4; the weights hardly move, so that every policy samples alike."""
    return {
        "steps": steps,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_tokens": 32},
        "optimizer": {"learning_rate": 1e-6},
        "precision": "bf16",
        "checkpoint_every": 1000,
        **changes,
    }


def job(model: str, settings: dict[str, Any], seed: int, **fields: Any) -> dict[str, Any]:
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    return {"model": model, "method": method, "rl": settings, "seed": seed, **fields}


def mix_a(steps: int) -> list[Task]:
    return [Task(f"a{n}", SHORT_ROWS, job(MODEL, rl(steps), seed=n)) for n in range(4)]


def mix_b(steps: int) -> list[Task]:
    settings = rl(steps, sampling={"max_tokens": 192}, shuffle=False)
    return [Task(f"b{n}", TAILED_ROWS, job(MODEL, settings, seed=n)) for n in range(4)]


def mix_c(steps: int) -> list[Task]:
    game = {"type": "guessing_game", "max_turns": 4, "turn_tokens": 6, "delay_s": [0.2, 2.0]}
    settings = rl(steps, prompts_per_step=2, sampling={"max_tokens": 96})
    return [Task(f"c{n}", GAME_ROWS, job(MODEL, settings, seed=n, environment=game)) for n in range(4)]


def mix_d(steps: int) -> list[Task]:
    slow = {"type": "async", "max_staleness": 1}
    full = {"tuning": {"type": "full"}, "optimizer": {"learning_rate": 1e-7}}
    return [
        Task("d0", SHORT_ROWS, job(MODEL, rl(steps, prompts_per_step=8), seed=0)),
        Task("d1", SHORT_ROWS, job(MODEL, rl(steps, mode=slow), seed=1)),
        Task("d2", SHORT_ROWS, job(HALF, rl(steps, **full), seed=2)),
        Task("d3", SHORT_ROWS, job(HALF, rl(steps, prompts_per_step=2), seed=3)),
    ]


MIXES = {"a": mix_a, "b": mix_b, "c": mix_c, "d": mix_d}


def make_half(source: Path, target: Path) -> Path:
    """A second base: the model with every other layer left out."""
    if target.exists():
        return target
    folder = target.with_name(f".{target.name}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    kept = range(0, config["num_hidden_layers"], 2)
    tensors = load_file(source / "model.safetensors")
    half = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if "layers" in parts:
            place = parts.index("layers") + 1
            if int(parts[place]) not in kept:
                continue
            parts[place] = str(kept.index(int(parts[place])))
        half[".".join(parts)] = tensor
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}, indent=2))
    folder.rename(target)
    return target
