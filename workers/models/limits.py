"""What one engine and one trainer hold, for whoever has to size or refuse a job before there are any."""

from __future__ import annotations

#: Tokens of KV cache, over all sequences that run at once.
KV_TOKENS = 65_536
#: The cache grows in steps of this many tokens.
KV_ROUND = 32
#: What a trainer keeps of a micro-batch for its way back; of a larger one it computes blocks again.
ACTIVATION_BYTES = 2 << 30
#: Positions whose logits are in memory at once. Products of fewer rows spend their time on reading the head.
LOGIT_ROWS = 128


def longest_sequence(context: int, kv_tokens: int = KV_TOKENS) -> int:
    """Prompt and ``max_tokens`` of one sequence together may not exceed this."""
    return min(context, kv_tokens // KV_ROUND * KV_ROUND)
