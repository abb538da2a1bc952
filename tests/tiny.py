"""A tiny random Llama that every fast test can run: about 0.6 M parameters, one character per token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from workers.models.config import parse_config
from workers.models.layout import tensor_shapes

SPECIAL = ("<unk>", "<eos>", "<user>", "<system>", "<assistant>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!'\"-:;+*=/()[]<>_%#"
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def make_tiny(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write the model into ``folder``; ``config`` overrides fields of its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = CONFIG | config
    _write(folder / "config.json", settings)
    _write(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 1})
    save_file(random_tensors(settings, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def random_tensors(settings: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Normal weights of deviation 0.05 and biases, norms around one, under Hugging Face's names."""
    config = parse_config(settings)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    def start(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return normal(*shape) + (1 if name.endswith("norm.weight") else 0)

    return {name: start(name, shape) for name, shape in tensor_shapes(config).items()}


def _write_tokenizer(folder: Path) -> None:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
