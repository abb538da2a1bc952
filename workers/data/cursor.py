"""The order of prompts as a function of the position alone.

Each epoch goes through all rows once. A seeded Feistel network permutes the rows without storing an order, so
a run that resumes needs nothing but its position, and a million rows cost no more than ten.
"""

from __future__ import annotations

import hashlib

ROUNDS = 6


def row_at(seed: int, position: int, n_rows: int, shuffle: bool) -> int:
    """The row, from 0, at ``position``, the number of prompts drawn before it in the whole run."""
    if n_rows < 1 or position < 0:
        raise ValueError(f"no row at position {position} of {n_rows} rows")
    epoch, offset = divmod(position, n_rows)
    return permute(offset, n_rows, f"{seed}:{epoch}") if shuffle else offset


def permute(value: int, size: int, key: str) -> int:
    """A bijection of range(size).

    The network permutes the next larger even power of two; walking on while the value lies outside the range
    restricts it to the range (https://www.cs.ucdavis.edu/~rogaway/papers/subset.pdf, "cycle walking").
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = feistel(value, half_bits, key)
    while value >= size:
        value = feistel(value, half_bits, key)
    return value


def feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for index in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}:{index}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half_bits | right
