"""Tokenizer and chat template of a model folder, without torch or transformers.

Templates come with models, and models may be a tenant's: they run in jinja's sandbox, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from workers.models.config import read_json


class ChatTokenizer:
    """``encode_chat`` for prompts, ``decode`` for completions;  ``ValueError`` for a folder without
    either.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"model folder {folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
        self._settings = read_json(folder, "tokenizer_config.json")
        self._template = _environment().from_string(_template_text(folder, self._settings))
        self.eos_ids = _eos_ids(folder, self._settings, self._tokenizer)
        self.vocab = self._tokenizer.get_vocab_size()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, assistant turn opened; ``ValueError`` says what the template refused."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=_token_text(self._settings.get("bos_token")),
                eos_token=_token_text(self._settings.get("eos_token")),
                pad_token=_token_text(self._settings.get("pad_token")),
                unk_token=_token_text(self._settings.get("unk_token")),
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        # The template writes the special tokens itself; adding them again would double the first.
        return self.encode(self.render(messages))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))


class StopText:
    """Finds stop texts in a growing completion by decoding only its end.

    A stop text of n bytes is spelled by at most n tokens, for each token spells at least one byte; the window
    adds a few tokens so that a character cut at its left edge cannot hide a match.
    """

    MARGIN = 8

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = max(len(text.encode()) for text in stop) + self.MARGIN

    def found(self, ids: Sequence[int]) -> str | None:
        """The first stop text the end of ``ids`` spells; call it after every token."""
        text = self._tokenizer.decode(ids[-self._window :], skip_special=False)
        return next((stop for stop in self._stop if stop in text), None)


def trim_stop(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the earliest stop text."""
    cuts = [text.find(entry) for entry in stop if entry in text]
    return text[: min(cuts)] if cuts else text


def _environment() -> ImmutableSandboxedEnvironment:
    """The same environment transformers renders templates in, so that prompts come out alike."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as transformers
    return environment


def _template_text(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(f"model folder {folder} has no chat template")  # noqa: TRY004 - one error type for bad folders
    return template


def _token_text(token: str | dict[str, Any] | None) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token or ""


def _eos_ids(folder: Path, settings: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a turn, as the folder's three files name them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            value = read_json(folder, name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    text = _token_text(settings.get("eos_token"))
    token = tokenizer.token_to_id(text) if text else None
    if token is not None:
        found.add(token)
    if not found:
        raise ValueError(f"model folder {folder} names no end-of-turn token")
    return frozenset(found)
