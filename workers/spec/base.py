"""What all parts of the contract are made of."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

TEMPLATE = re.compile(r"\{\{\s*([a-zA-Z0-9_.\[\]]+)\s*\}\}")
SEED_MAX = 2**31 - 1

#: Values of ``type`` that pydantic puts into an error's path; a reader looks for fields only.
UNION_TAGS = frozenset(
    {"string_check", "text_similarity", "math", "python", "json_schema", "score_model", "endpoint", "multi"}
    | {"lora", "full", "sync", "async"}
    | {"guessing_game", "grid_world", "chat", "tools", "remote", "reasoning_gym"}
    | {"calculator", "search"}
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def first_error(error: Any) -> tuple[str, str]:
    """The dotted field path and the reason of a pydantic ``ValidationError``'s first entry."""
    entry = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in entry["loc"] if part not in UNION_TAGS)
    return path, entry["msg"].removeprefix("Value error, ")
