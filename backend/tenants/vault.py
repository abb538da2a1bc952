"""Secrets at rest: encrypted, and unread by whoever has the database but not the settings' own secret.

Fernet (AES-128-CBC and HMAC-SHA256) under a key that is derived from ``SECRET_KEY``; what was written under
one of ``SECRET_KEY_FALLBACKS`` is still read.
"""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

PURPOSE = b"jigsaw: secrets of organizations"


class Unreadable(Exception):
    """Written under a key that the settings no longer have."""


def seal(value: str) -> bytes:
    return _box().encrypt(value.encode())


def unseal(token: bytes) -> str:
    """Raises ``Unreadable``."""
    try:
        return _box().decrypt(bytes(token)).decode()
    except InvalidToken:
        raise Unreadable from None


def _box() -> MultiFernet:
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return MultiFernet([Fernet(_derived(key)) for key in keys])


def _derived(key: str) -> bytes:
    kdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=PURPOSE)
    return base64.urlsafe_b64encode(kdf.derive(key.encode()))
