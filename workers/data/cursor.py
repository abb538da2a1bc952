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


def rows_of(
    seed: int, step: int, round: int, prompts: int, steps: int, n_rows: int, shuffle: bool
) -> list[int]:
    """The rows of a step's ``prompts`` groups in a round of its sampling, from 0.

    The first round takes what comes next. Further rounds take what would come after the whole run's
    ``steps`` steps, so that no step's rows depend on what others needed; rows of the step's earlier rounds
    come again only when the data have no others.
    """
    start = (round * steps + step) * prompts
    if round == 0:
        return [row_at(seed, start + group, n_rows, shuffle) for group in range(prompts)]
    earlier = {
        row for before in range(round) for row in rows_of(seed, step, before, prompts, steps, n_rows, shuffle)
    }
    found = [row_at(seed, start + place, n_rows, shuffle) for place in range(prompts + len(earlier))]
    fresh = [row for row in dict.fromkeys(found) if row not in earlier]
    return (fresh + found)[:prompts]


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
