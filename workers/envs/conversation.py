"""Writing an environment's answer behind a turn of the model, in tokens.

Token in, token out: the turn stays as it was sampled. What the chat template writes between the end of an
assistant's turn and the beginning of its next is found by rendering a conversation whose turn is a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.envs.problems import EnvironmentProblem
from workers.models.chat import ChatTokenizer

MARK = "\N{REFERENCE MARK}turn\N{REFERENCE MARK}"


def observation_tokens(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], turn: Sequence[int], answer: str
) -> list[int]:
    """What follows the sampled ``turn``: its end if it has none, the answer, the opening of the next turn.

    Raises ``EnvironmentProblem`` for a chat template that has no place for a conversation.
    """
    talk = [*messages, {"role": "assistant", "content": MARK}, {"role": "user", "content": answer}]
    try:
        _, mark, after = tokenizer.render(talk).rpartition(MARK)
    except ValueError as error:
        raise EnvironmentProblem(str(error)) from None
    if not mark:
        raise EnvironmentProblem("the model's chat template leaves out earlier turns")
    tokens = tokenizer.encode(after)
    ended = turn[-1] in tokenizer.eos_ids
    return tokens[1:] if ended and tokens[0] in tokenizer.eos_ids else tokens
