"""Which samples are trained. Tokens are masked by position alone: every sampled token of a kept sample
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def kept_samples(
    finishes: Sequence[Literal["stop", "length"]], valid: Sequence[bool], mask_truncated: bool
) -> list[bool]:
    """A sample is left out when its grade failed, or it was cut at ``max_tokens`` and the job asks so."""
    return [
        ok and not (mask_truncated and finish == "length") for finish, ok in zip(finishes, valid, strict=True)
    ]
