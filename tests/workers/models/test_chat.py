from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.tiny import make_tiny
from workers.models.chat import ChatTokenizer, StopText, trim_stop

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say 12, then stop!"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_prompts_equal_those_of_transformers(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ours = ChatTokenizer(folder)
    assert ours.render(MESSAGES) == expected == "<system>Be brief.\n<user>say 12, then stop!\n<assistant>"
    assert ours.encode_chat(MESSAGES) == theirs(expected, add_special_tokens=False)["input_ids"]


def test_round_trip_and_special_tokens(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    ids = [*tokenizer.encode("two words"), 1]
    assert tokenizer.decode(ids) == "two words"
    assert tokenizer.decode(ids, skip_special=False) == "two words<eos>"
    assert tokenizer.eos_ids == {1}


def test_every_end_of_turn_token_is_found(folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path, eos_token_id=[1, 4])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert ChatTokenizer(tmp_path).eos_ids == {1, 3, 4}


def test_template_file_wins_and_runs_in_a_sandbox(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        ChatTokenizer(tmp_path).render(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system turn, please') }}")
    with pytest.raises(ValueError, match="no system turn, please"):
        ChatTokenizer(tmp_path).render(MESSAGES)


def test_truncation_and_padding_of_the_file_are_off(folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_truncation(5)
    saved.enable_padding(length=400)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert ChatTokenizer(tmp_path).encode_chat(MESSAGES) == ChatTokenizer(folder).encode_chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools is none and documents is none %}none{% else %}some{% endif %}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages | tojson(indent=2) }}",
        "{{ 'é<' | tojson }}{{ 'é' | tojson(ensure_ascii=true) }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ChatTokenizer(tmp_path).render(MESSAGES) == expected


def test_a_template_learns_the_same_date_every_day(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("Today: {{ strftime_now('%d %b %Y') }}")
    assert ChatTokenizer(tmp_path).render(MESSAGES) == "Today: 01 Jan 2026"


def test_developer_is_the_system(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    assert tokenizer.render(developer) == tokenizer.render(MESSAGES)
    assert developer[0]["role"] == "developer"


@pytest.mark.parametrize("template", ["{% for %}", "{% generation %}", "{{ messages | nofilter }}"])
def test_a_template_that_does_not_compile_is_a_bad_folder(template: str, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="the chat template cannot be read"):
        ChatTokenizer(tmp_path)


@pytest.mark.parametrize("expression", ["messages + 1", "1 // 0", "messages[0].content()", "nothing.at.all"])
def test_whatever_fails_in_a_template_is_a_refusal(expression: str, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ " + expression + " }}")
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        ChatTokenizer(tmp_path).render(MESSAGES)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "{}", "has no chat template"),
    ],
)
def test_bad_folders_are_refused(file: str, content: str | None, reason: str, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=reason):
        ChatTokenizer(tmp_path)


def test_stop_text_is_found_at_the_end_of_a_long_completion(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    stop = StopText(tokenizer, ("end.", "never"))
    ids = tokenizer.encode("a long completion " * 20 + "the end.")
    assert stop.found(ids) == "end."
    assert stop.found(ids[:-1]) is None


def test_trim_stop_cuts_at_the_earliest() -> None:
    assert trim_stop("one two three", ("three", "two")) == "one "
    assert trim_stop("one", ("two",)) == "one"


def test_imports_without_torch() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'safetensors', 'numpy'])); "
        "import workers.models.chat, workers.models.describe"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
