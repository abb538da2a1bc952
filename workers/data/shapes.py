"""What a row of a file must be, by what is to be learned from it.

    prompt      {"messages": [..., user]} and fields that the grader or the environment reads
    completion  {"messages": [..., assistant]}: its assistant's messages are learned
    preference  {"input": {"messages": [..., user]}, "preferred_output", "non_preferred_output"}, as OpenAI
                has it, or {"messages": [..., user], "chosen", "rejected"}; an output is a list of messages of
                the assistant's, one such message, or its text

A row may be several of them. Passages of a corpus are ``{"title", "text"}``.
"""

from __future__ import annotations

from typing import Any

from workers.data.problems import MAX_FIELD_CHARS, kind_of, refuse, refuse_field, shown

Row = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant")
PROMPT, COMPLETION, PREFERENCE = "prompt", "completion", "preference"
#: Of preferences: where the two outputs stand, in OpenAI's shape and in the other.
OUTPUTS = ("preferred_output", "non_preferred_output")
CHOICES = ("chosen", "rejected")
#: Said of a row that is not what a job needs.
WANTED = {
    PROMPT: "its last message must be the user's",
    COMPLETION: "its last message must be the assistant's",
    PREFERENCE: 'it must be {"input", "preferred_output", "non_preferred_output"} or '
    '{"messages", "chosen", "rejected"}',
}


def check_row(row: Row, number: int) -> frozenset[str]:
    """What the row can be used as. Raises RowProblem where that is nothing."""
    if "messages" not in row:
        if "input" in row:
            return _check_preference(row, number)
        refuse(number, None, "messages", f"row {number} has no field messages")
    last = _check_messages(row["messages"], "messages", number)
    if last == "assistant":
        if row["messages"][0]["role"] == "assistant":
            refuse_field(number, "messages[0].role", "must not be assistant: there is nothing to answer")
        return frozenset({COMPLETION})
    if last != "user":
        path = f"messages[{len(row['messages']) - 1}].role"
        refuse_field(number, path, f"must be user or assistant in the last message, not {last}")
    if "input" in row or not all(name in row for name in CHOICES):
        return frozenset({PROMPT})
    for name in CHOICES:
        _check_output(row[name], name, number)
    return frozenset({PROMPT, PREFERENCE})


def check_passage(row: Row, number: int) -> frozenset[str]:
    """A passage of a corpus. Raises RowProblem."""
    for name in ("title", "text"):
        if name not in row:
            refuse(number, None, name, f"row {number} has no field {name}")
        if not isinstance(row[name], str):
            refuse_field(number, name, f"must be a string, not {kind_of(row[name])}")
    if not row["text"].strip():
        refuse_field(number, "text", "must not be empty")
    return frozenset()


def _check_preference(row: Row, number: int) -> frozenset[str]:
    for name in ("input", *OUTPUTS):
        if name not in row:
            refuse(number, None, name, f"row {number} has no field {name}")
    asked = row["input"]
    if not isinstance(asked, dict):
        refuse_field(number, "input", f"must be an object, not {kind_of(asked)}")
    if "messages" not in asked:
        refuse_field(number, "input.messages", "is missing")
    last = _check_messages(asked["messages"], "input.messages", number)
    if last != "user":
        path = f"input.messages[{len(asked['messages']) - 1}].role"
        refuse_field(number, path, f"must be user in the last message, not {last}")
    for name in asked:
        if name != "messages" and asked[name] not in ([], None, True):
            refuse_field(number, f"input.{name[:MAX_FIELD_CHARS]}", "is not supported")
    for name in OUTPUTS:
        _check_output(row[name], name, number)
    return frozenset({PREFERENCE})


def _check_output(output: Any, path: str, number: int) -> None:
    if isinstance(output, str):
        if not output.strip():
            refuse_field(number, path, "must not be empty")
        return
    messages = [output] if isinstance(output, dict) else output
    _check_messages(messages, path, number)
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            refuse_field(number, f"{path}[{position}].role", f"must be assistant, not {message['role']}")


def _check_messages(messages: Any, path: str, number: int) -> str:
    """The last message's role."""
    if not isinstance(messages, list):
        refuse_field(number, path, f"must be a list, not {kind_of(messages)}")
    if not messages:
        refuse_field(number, path, "must hold at least one message")
    for position, message in enumerate(messages):
        check_message(message, f"{path}[{position}]", number)
    role: str = messages[-1]["role"]
    return role


def check_message(message: Any, path: str, number: int) -> None:
    if not isinstance(message, dict):
        refuse_field(number, path, f"must be an object, not {kind_of(message)}")
    for key in ("role", "content"):
        if key not in message:
            refuse_field(number, f"{path}.{key}", "is missing")
    if message["role"] not in ROLES:
        refuse_field(
            number, f"{path}.role", f"must be one of {', '.join(ROLES)}, not {shown(message['role'])}"
        )
    content = message["content"]
    if not isinstance(content, str):
        refuse_field(number, f"{path}.content", f"must be a string, not {kind_of(content)}")
    if not content.strip():
        refuse_field(number, f"{path}.content", "must not be empty")
    if "\0" in content:
        refuse_field(number, f"{path}.content", "holds the character U+0000")
    for key in message:
        if key not in ("role", "content"):
            refuse_field(
                number, f"{path}.{key[:MAX_FIELD_CHARS]}", "is not supported: it would have no effect"
            )
