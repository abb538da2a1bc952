"""Tokenizer and chat template of a model folder, without torch or transformers.

Templates come with models, and models may be a tenant's: they run in jinja's sandbox, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from workers.models.config import read_json

#: What templates that write today's date are told, so that a job resumed on another day has the same prompts.
PROMPT_DATE = datetime(2026, 1, 1)  # noqa: DTZ001 - a date on paper, in no zone
#: Templates know the older name only.
ROLES = {"developer": "system"}


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
        # Both may be set in the file: a prompt must be all of the messages and nothing else.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = read_json(folder, "tokenizer_config.json")
        try:
            self._template = _environment().from_string(_template_text(folder, self._settings))
        except TemplateError as error:
            raise ValueError(f"model folder {folder}: the chat template cannot be read: {error}") from None
        self.eos_ids = _eos_ids(folder, self._settings, self._tokenizer)
        self.vocab = self._tokenizer.get_vocab_size()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, assistant turn opened; ``ValueError`` says what the template refused.

        The role ``developer`` is ``system``; the date is always ``PROMPT_DATE``.
        """
        chat = [{**message, "role": ROLES.get(message["role"], message["role"])} for message in messages]
        try:
            return self._template.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                bos_token=_token_text(self._settings.get("bos_token")),
                eos_token=_token_text(self._settings.get("eos_token")),
                pad_token=_token_text(self._settings.get("pad_token")),
                unk_token=_token_text(self._settings.get("unk_token")),
            )
        except Exception as error:  # a template is a program, and may fail in any way a program can
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


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for others to train on; its text is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    """The same environment transformers renders templates in, so that prompts come out alike."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = PROMPT_DATE.strftime
    return environment


def _template_text(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ValueError(f"model folder {folder} has no chat template")  # noqa: TRY004 - one error type for bad folders
    return template


def _token_text(token: str | dict[str, Any] | None) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return str(text or "")


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
