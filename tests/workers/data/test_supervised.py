"""Rows of the data to tokens: which are there, and which of them are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tiny
from workers.data.supervised import Example, batch_of, completion_of, pair_of
from workers.models.chat import ChatTokenizer

#: As ChatML: turns end with the end token, which is written.
ENDS = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
#: Only the last turn keeps its text, as templates do that drop what was thought.
FORGETS = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] != 'assistant' or loop.last %}{{ message['content'] }}{% else %}old{% endif %}"
    "{{ '<eos>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture
def templated(tmp_path: Path):
    def made(template: str) -> ChatTokenizer:
        folder = make_tiny(tmp_path / "model")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        return ChatTokenizer(folder)

    return made


def shown(tokenizer: ChatTokenizer, example: Example) -> tuple[str, str, str]:
    """The prompt, what follows it, and of that what is trained."""
    trained = [token for token, mark in zip(example.tokens, example.trained, strict=True) if mark]
    return tuple(tokenizer.decode(part, False) for part in (example.prompt, example.tokens, trained))


def test_every_turn_of_the_assistant_is_trained_and_its_end(templated):
    tokenizer = templated(ENDS)
    (example,) = completion_of(tokenizer, {"messages": TALK}, 64)
    assert shown(tokenizer, example) == (
        "<user>hi<eos>\n<assistant>",
        "yes<eos>\n<user>and<eos>\n<assistant>no<eos>",
        "yes<eos>no<eos>",
    )


def test_a_template_that_writes_no_end_gets_the_models_own(tokenizer):
    (example,) = completion_of(tokenizer, {"messages": TALK}, 64)
    assert shown(tokenizer, example) == (
        "<user>hi\n<assistant>",
        "yes<eos>\n<user>and\n<assistant>no<eos>",
        "yes<eos>no<eos>",
    )


def test_where_earlier_turns_are_written_otherwise_only_the_last_is_trained(templated):
    tokenizer = templated(FORGETS)
    (example,) = completion_of(tokenizer, {"messages": TALK}, 64)
    assert shown(tokenizer, example) == (
        "<user>hi<eos>\n<assistant>old<eos>\n<user>and<eos>\n<assistant>",
        "no<eos>",
        "no<eos>",
    )


def test_what_is_trained_is_what_a_rollout_of_it_would_be(templated):
    """The prompt of the last turn, as the model meets it in use, is the example up to there."""
    tokenizer = templated(ENDS)
    (example,) = completion_of(tokenizer, {"messages": TALK}, 64)
    last = len(tokenizer.encode("no")) + 1
    assert [*example.prompt, *example.tokens[:-last]] == tokenizer.encode_chat(TALK[:-1])


@pytest.mark.parametrize(
    "row",
    [
        {
            "input": {"messages": TALK[:3]},
            "preferred_output": [{"role": "assistant", "content": "good"}],
            "non_preferred_output": [{"role": "assistant", "content": "bad one"}],
        },
        {"messages": TALK[:3], "chosen": "good", "rejected": {"role": "assistant", "content": "bad one"}},
    ],
)
def test_a_pair_has_one_prompt_and_the_preferred_first(templated, row):
    """The assistant's turn in the prompt is read, not trained."""
    tokenizer = templated(ENDS)
    preferred, other = pair_of(tokenizer, row, 16)
    prompt = "<user>hi<eos>\n<assistant>yes<eos>\n<user>and<eos>\n<assistant>"
    assert shown(tokenizer, preferred) == (prompt, "good<eos>", "good<eos>")
    assert shown(tokenizer, other) == (prompt, "bad one<eos>", "bad one<eos>")
    batch = batch_of([[preferred, other], [other, preferred]])
    assert batch.groups == [0, 0, 1, 1]
    assert batch.completions[0] == batch.completions[3] == preferred.tokens


def test_the_longest_completion_fits_and_one_more_token_does_not(tokenizer):
    row = {"messages": TALK[:2]}
    assert completion_of(tokenizer, row, 4)
    with pytest.raises(ValueError, match="messages: what follows the prompt has 4 tokens"):
        completion_of(tokenizer, row, 3)


@pytest.mark.parametrize("messages", [TALK[:1], TALK[:3], [{"role": "system", "content": "x"}]])
def test_a_talk_ends_with_the_assistant(tokenizer, messages):
    with pytest.raises(ValueError, match="the last message must be the assistant's"):
        completion_of(tokenizer, {"messages": messages}, 64)
