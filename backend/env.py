"""Typed readers of environment variables. A bad value stops the start and says what was expected.

Every secret may be given as ``NAME`` or as ``NAME_FILE``, the path of a file that holds it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured


def text(name: str, default: str | None = None) -> str:
    value = os.environ.get(name, default)
    if value is None:
        raise ImproperlyConfigured(f"{name} is not set")
    return value


def flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None:
        return default
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off", ""}:
        return False
    raise ImproperlyConfigured(f"{name} must be one of 1, 0, true, false, yes, no, on, off; got {value!r}")


def integer(name: str, default: int) -> int:
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a whole number; got {value!r}") from None


def at_least(name: str, default: float, least: float) -> float:
    """A number that is not below ``least``."""
    text = os.environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not value >= least:
        raise ImproperlyConfigured(f"{name} must be a number of at least {least:g}; got {text!r}")
    return value


def words(name: str, default: str) -> list[str]:
    return [word.strip() for word in os.environ.get(name, default).split(",") if word.strip()]


def secret(name: str) -> str | None:
    path = os.environ.get(f"{name}_FILE")
    if path:
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise ImproperlyConfigured(f"{name}_FILE cannot be read: {error}") from None
    return os.environ.get(name)


def database(url: str) -> dict[str, object]:
    """``postgresql://user:password@host:port/name?host=/socket/folder`` as a Django database entry."""
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"}:
        raise ImproperlyConfigured(f"DATABASE_URL must start with postgresql://; got {parts.scheme!r}")
    query = dict(parse_qsl(parts.query))
    name = parts.path.lstrip("/")
    if not name:
        raise ImproperlyConfigured("DATABASE_URL names no database: postgresql://user@host/NAME")
    host = query.pop("host", None) or parts.hostname or ""
    port = query.pop("port", None) or parts.port or ""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(name),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host,
        "PORT": str(port),
        "OPTIONS": query,
    }
