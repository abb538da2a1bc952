from __future__ import annotations

import pytest
import torch

from workers.engines import precision


@pytest.mark.parametrize(
    ("requested", "device", "flags", "dtype"),
    [
        ("auto", "cpu", {"avx512_bf16"}, torch.bfloat16),
        ("auto", "cpu", {"amx_bf16", "sse2"}, torch.bfloat16),
        ("auto", "cpu", {"avx512f"}, torch.float32),
        ("auto", "cuda", set(), torch.bfloat16),
        ("fp32", "cuda", {"amx_bf16"}, torch.float32),
        ("bf16", "cpu", set(), torch.bfloat16),
    ],
)
def test_choice(
    requested: str, device: str, flags: set[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_flags", lambda: frozenset(flags))
    assert precision.choose_dtype(requested, torch.device(device)) == dtype  # type: ignore[arg-type]
