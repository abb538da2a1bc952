"""What one rollout engine can hold, for whoever has to refuse a job before there is an engine."""

from __future__ import annotations

#: Tokens of KV cache, over all sequences that run at once.
KV_TOKENS = 65_536
#: The cache grows in steps of this many tokens.
KV_ROUND = 32


def longest_sequence(context: int, kv_tokens: int = KV_TOKENS) -> int:
    """Prompt and ``max_tokens`` of one sequence together may not exceed this."""
    return min(context, kv_tokens // KV_ROUND * KV_ROUND)
