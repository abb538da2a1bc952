"""What a model learns from the data's own completions: rows to tokens, and which of them are trained.

A conversation is written as rollouts of several turns are: an assistant's turn is its text and the token
that ends it, both trained; what the chat template writes from there to the next turn is read and not trained.
Where a template writes an earlier turn in another way once others follow, only the last turn is trained,
behind all that the template makes of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from workers.envs.conversation import MARK
from workers.models.chat import ChatTokenizer
from workers.rl.batching import Batch

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """A prompt and what follows it; of that, the tokens that are trained."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]


def completion_of(tokenizer: ChatTokenizer, row: Mapping[str, Any], max_tokens: int) -> tuple[Example]:
    """A row's conversation (``messages``), of which every assistant's turn is trained.

    ``ValueError`` says what is wrong with it, a completion of more than ``max_tokens`` included.
    """
    return (_bounded(_example(tokenizer, row["messages"], 0), max_tokens, "messages"),)


def pair_of(tokenizer: ChatTokenizer, row: Mapping[str, Any], max_tokens: int) -> tuple[Example, Example]:
    """The preferred completion of a prompt and the other one, in this order.

    OpenAI's shape is ``{"input": {"messages"}, "preferred_output", "non_preferred_output"}``, others write
    ``{"messages", "chosen", "rejected"}``; a completion is a list of messages, one message or its text.
    ``ValueError`` as above.
    """
    if "input" in row:
        messages, names = row["input"]["messages"], ("preferred_output", "non_preferred_output")
    else:
        messages, names = row["messages"], ("chosen", "rejected")
    preferred, other = (
        _bounded(_example(tokenizer, [*messages, *_messages(row[name])], len(messages)), max_tokens, name)
        for name in names
    )
    return preferred, other


def batch_of(rows: Sequence[Sequence[Example]]) -> Batch:
    """Each row is a group. Nobody sampled: there are no log-probs, and every trained token counts alike."""
    placed = [(group, example) for group, examples in enumerate(rows) for example in examples]
    return Batch(
        groups=[group for group, _ in placed],
        prompts=[example.prompt for _, example in placed],
        completions=[example.tokens for _, example in placed],
        engine_logprobs=[[0.0] * len(example.tokens) for _, example in placed],
        advantages=[[float(trained) for trained in example.trained] for _, example in placed],
        keep=[True] * len(placed),
        sampled=[list(example.trained) for _, example in placed],
    )


def _messages(output: Any) -> list[Message]:
    if isinstance(output, str):
        return [{"role": "assistant", "content": output}]
    return [output] if isinstance(output, Mapping) else list(output)


def _bounded(example: Example, max_tokens: int, name: str) -> Example:
    if len(example.tokens) > max_tokens:
        raise ValueError(
            f"{name}: what follows the prompt has {len(example.tokens):,} tokens, "
            f"rl.sampling.max_tokens is {max_tokens:,}"
        )
    return example


def _example(tokenizer: ChatTokenizer, messages: Sequence[Message], first: int) -> Example:
    """The assistant's turns from the message ``first`` on, or the last of them."""
    turns = [place for place in range(first, len(messages)) if messages[place]["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        raise ValueError("the last message must be the assistant's")
    after = [_after(tokenizer, messages, *between) for between in pairwise(turns)]
    if _as_written(tokenizer, messages, turns, after):
        return _written(tokenizer, messages, turns, after)
    return _written(tokenizer, messages, turns[-1:], [])


def _after(tokenizer: ChatTokenizer, messages: Sequence[Message], turn: int, following: int) -> str:
    """What the template writes from the end of a turn to the beginning of the following one."""
    marked = [*messages[:turn], {**messages[turn], "content": MARK}, *messages[turn + 1 : following]]
    return tokenizer.render(marked).rpartition(MARK)[2]


def _as_written(
    tokenizer: ChatTokenizer, messages: Sequence[Message], turns: Sequence[int], after: Sequence[str]
) -> bool:
    """Whether the turns stay what they are when others follow."""
    text = tokenizer.render(messages[: turns[0]])
    for turn, between in zip(turns[:-1], after, strict=True):
        text += messages[turn]["content"] + between
    return text == tokenizer.render(messages[: turns[-1]])


def _written(
    tokenizer: ChatTokenizer, messages: Sequence[Message], turns: Sequence[int], after: Sequence[str]
) -> Example:
    ends = [*after, _after(tokenizer, messages, turns[-1], len(messages))]
    tokens: list[int] = []
    trained: list[bool] = []
    for turn, text in zip(turns, ends, strict=True):
        said, between = tokenizer.encode(messages[turn]["content"]), tokenizer.encode(text)
        if between and between[0] in tokenizer.eos_ids:
            said.append(between.pop(0))
        else:
            said.append(min(tokenizer.eos_ids))
        more = between if turn != turns[-1] else []
        tokens += [*said, *more]
        trained += [True] * len(said) + [False] * len(more)
    return Example(tuple(tokenizer.encode_chat(messages[: turns[0]])), tuple(tokens), tuple(trained))
