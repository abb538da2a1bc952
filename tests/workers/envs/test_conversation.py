"""What follows a turn, in tokens, continues the conversation as the chat template would write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny
from workers.envs.conversation import observation_tokens
from workers.envs.problems import EnvironmentProblem
from workers.models.chat import ChatTokenizer

MESSAGES = [{"role": "user", "content": "guess"}]
CLOSING = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<eos>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def with_template(folder: Path, template: str) -> ChatTokenizer:
    make_tiny(folder)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def conversation(tokenizer: ChatTokenizer, turn: str, answer: str) -> list[int]:
    talk = [*MESSAGES, {"role": "assistant", "content": turn}, {"role": "user", "content": answer}]
    return tokenizer.encode_chat(talk)


@pytest.mark.parametrize("ended", [True, False])
def test_the_turns_end_is_there_once_whether_it_was_sampled_or_cut(tmp_path, ended):
    tokenizer = with_template(tmp_path / "model", CLOSING)
    turn = tokenizer.encode("12<eos>" if ended else "12")
    following = observation_tokens(tokenizer, MESSAGES, turn, "higher")
    whole = tokenizer.encode_chat(MESSAGES) + turn + following
    assert whole == conversation(tokenizer, "12", "higher")


def test_an_end_that_the_template_does_not_write_stays(tokenizer):
    turn = tokenizer.encode("12<eos>")
    following = observation_tokens(tokenizer, MESSAGES, turn, "higher")
    assert tokenizer.decode(following, skip_special=False) == "\n<user>higher\n<assistant>"


def test_a_turn_is_not_written_again_even_if_it_would_be_spelled_otherwise(tokenizer):
    """Whatever was sampled, what follows is the same."""
    one = observation_tokens(tokenizer, MESSAGES, tokenizer.encode("1<eos>"), "higher")
    other = observation_tokens(tokenizer, MESSAGES, tokenizer.encode("<user><user> 7<eos>"), "higher")
    assert one == other


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[-1]['content'] }}", "leaves out earlier turns"),
        ("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}", "one at a time"),
    ],
)
def test_a_template_without_room_for_a_conversation_is_a_problem(tmp_path, template, words):
    tokenizer = with_template(tmp_path / "model", template)
    with pytest.raises(EnvironmentProblem, match=words):
        observation_tokens(tokenizer, MESSAGES, [7], "higher")
