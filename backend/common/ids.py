"""Public identifiers: a prefix that says what it names, and 22 random letters and digits (131 bits)."""

from __future__ import annotations

import secrets
import string

ALPHABET = string.ascii_letters + string.digits


def new_id(prefix: str) -> str:
    return f"{prefix}-{''.join(secrets.choice(ALPHABET) for _ in range(22))}"
