"""The model's folder where ``make demo`` has made it, and the steps of its conversion everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.embedded.paths import PROJECT
from tests.workers.engines.adapters import logits
from workers.engines.engine import TorchEngine
from workers.engines.sequences import Request
from workers.engines.weights import load_weights
from workers.models import smollm2
from workers.models.chat import ChatTokenizer

FOLDER = PROJECT / "var" / "models" / smollm2.NAME
needs_model = pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} has not been made")


def test_unpermute_restores_the_half_split_layout() -> None:
    # Two heads of four rows. GGUF has the rows of the two halves alternate.
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7])[:, None]
    assert smollm2._unpermute(rows, heads=2)[:, 0].tolist() == list(range(8))


def test_tensor_names() -> None:
    assert smollm2._tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2._tensor_name("blk.7.ffn_down.weight") == "model.layers.7.mlp.down_proj.weight"


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    made = tmp_path / smollm2.NAME
    made.mkdir()
    (made / "marker").write_text("mine")
    assert smollm2.ensure_smollm2(tmp_path) == made
    assert [path.name for path in made.iterdir()] == ["marker"]


@needs_model
def test_folder_equals_transformers_and_knows_things() -> None:
    tokenizer, theirs = ChatTokenizer(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "user", "content": "What is the capital of France? It's 2024, naïve 東京 😀!"}]
    ids = tokenizer.encode_chat(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    weights = load_weights(FOLDER, torch.float32, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    found = logits(weights, ids)
    assert (found - expected).abs().max() < 1e-3
    engine = TorchEngine(weights, tokenizer)
    engine.open("chat")
    question = tuple(tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}]))
    engine.submit([Request("chat", (0,), question, 24, (0,), temperature=0.0, stop_ids=tokenizer.eos_ids)])
    (answer,) = engine.decode().finished
    assert "Paris" in tokenizer.decode(answer.tokens)
