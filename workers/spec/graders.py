"""How completions are graded: OpenAI's graders, and some of ours.

A grader gives a score or an error that says why there is none; an error is never a score of 0.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from workers.spec.base import SEED_MAX, TEMPLATE, Strict

OUTPUT_TEXT = "{{sample.output_text}}"
#: The name of a secret of the organization; the value never stands in a spec.
SecretName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
Url = Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^https?://[^\s]+$")]


class StringCheckGrader(Strict):
    """1.0 when ``input`` stands in the relation ``operation`` to ``reference``, else 0.0."""

    type: Literal["string_check"]
    name: str = Field("string_check", min_length=1, max_length=64)
    input: str = OUTPUT_TEXT
    reference: str
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"


class TextSimilarityGrader(Strict):
    """Similarity of ``input`` to ``reference`` in [0, 1].

    fuzzy_match: normalized edit similarity; bleu, gleu, meteor: of their words (meteor without synonyms);
    rouge_N: F1 of their N-grams, rouge_l of their longest common subsequence.
    """

    type: Literal["text_similarity"]
    name: str = Field("text_similarity", min_length=1, max_length=64)
    input: str = OUTPUT_TEXT
    reference: str
    evaluation_metric: Literal[
        "fuzzy_match",
        "bleu",
        "gleu",
        "meteor",
        "rouge_1",
        "rouge_2",
        "rouge_3",
        "rouge_4",
        "rouge_5",
        "rouge_l",
    ] = "fuzzy_match"


class MathGrader(Strict):
    """1.0 when the answer in ``input`` equals ``reference`` as mathematics (math-verify), else 0.0."""

    type: Literal["math"]
    name: str = Field("math", min_length=1, max_length=64)
    input: str = OUTPUT_TEXT
    reference: str


class JsonSchemaGrader(Strict):
    """1.0 when ``input`` is JSON that fits the schema (JSON Schema, draft 2020-12), else 0.0."""

    type: Literal["json_schema"]
    name: str = Field("json_schema", min_length=1, max_length=64)
    input: str = OUTPUT_TEXT
    json_schema: dict[str, Any]


class PythonGrader(Strict):
    """A tenant's ``def grade(sample, item) -> float``, run in a sandboxed process with a time limit."""

    type: Literal["python"]
    name: str = Field("python", min_length=1, max_length=64)
    source: str = Field(min_length=1, max_length=256 * 1024)
    timeout_s: float = Field(10.0, gt=0, le=60, description="wall-clock limit of one grade, in seconds")


class ModelMessage(Strict):
    """A message to the model. OpenAI's parts of text, ``{"type": "input_text", "text": ...}``, are taken for
    the text that they make up, a line for each.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _without_type(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "message":
            return {key: each for key, each in value.items() if key != "type"}
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, value: Any) -> Any:
        parts = value if isinstance(value, list) else [value]
        texts = [_text_of_part(part) for part in parts]
        return value if None in texts else "\n".join(str(text) for text in texts)


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        part = part.get("text")
    return part if isinstance(part, str) else None


#: Names of OpenAI's ``sampling_params`` that are others here.
SAMPLING_PARAMS = {"max_completions_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}


class ScoreModelGrader(Strict):
    """A language model's opinion, as a number, by any URL that speaks OpenAI's chat completions.

    The reply's last number is the score; outside ``range`` it is an error.
    """

    type: Literal["score_model"]
    name: str = Field("score_model", min_length=1, max_length=64)
    url: Url = Field(description="the API's base, up to and with its /v1")
    model: str = Field(min_length=1, max_length=200)
    input: tuple[ModelMessage, ...] = Field(min_length=1, max_length=32, description="with templates")
    secret: SecretName | None = Field(None, description="the secret that holds the API key")
    range: tuple[float, float] = Field((0.0, 1.0), description="lowest and highest score")
    max_tokens: int | None = Field(256, ge=1, le=32_768, description="null: as the server has it")
    temperature: float | None = Field(0.0, ge=0, le=2, description="null: as the server has it")
    top_p: float | None = Field(None, gt=0, le=1, description="left out: as the server has it")
    seed: int | None = Field(None, ge=0, le=SEED_MAX, description="for servers that know seeds")
    timeout_s: float = Field(30.0, gt=0, le=300, description="wall-clock limit of one grade, in seconds")

    @model_validator(mode="before")
    @classmethod
    def _openai_sampling_params(cls, value: Any) -> Any:
        """OpenAI's ``sampling_params`` are fields of the grader here."""
        if not isinstance(value, dict) or not isinstance(value.get("sampling_params"), dict):
            return value
        given = {SAMPLING_PARAMS.get(name, name): each for name, each in value["sampling_params"].items()}
        rest = {name: each for name, each in value.items() if name != "sampling_params"}
        if twice := given.keys() & rest.keys():
            raise ValueError(f"{min(twice)} is given twice, also in sampling_params")
        return {**rest, **given}

    @model_validator(mode="after")
    def _range_in_order(self) -> ScoreModelGrader:
        if not self.range[0] < self.range[1]:
            raise ValueError("range needs its lowest score first, and a higher one after it")
        return self


class EndpointGrader(Strict):
    """A tenant's own server: each sample is posted to it, signed by Standard Webhooks.

    {"sample": {"output_text", "output_json" if it is JSON}, "item": the row} -> {"score": number}
    """

    type: Literal["endpoint"]
    name: str = Field("endpoint", min_length=1, max_length=64)
    url: Url
    secret: SecretName = Field(description="the secret that requests are signed with")
    timeout_s: float = Field(30.0, gt=0, le=300, description="wall-clock limit of one grade, in seconds")


PlainGrader = Annotated[
    StringCheckGrader
    | TextSimilarityGrader
    | MathGrader
    | JsonSchemaGrader
    | PythonGrader
    | ScoreModelGrader
    | EndpointGrader,
    Field(discriminator="type"),
]
GraderName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$", max_length=64)]


class MultiGrader(Strict):
    """Several graders and a formula over their scores, which are called by their names in ``graders``.

    The formula knows numbers, names, ``+ - * / **`` (also written ``^``), comparisons, ``and or not``,
    brackets, and the functions ``min max abs floor ceil exp sqrt log``.
    """

    type: Literal["multi"]
    name: str = Field("multi", min_length=1, max_length=64)
    graders: dict[GraderName, PlainGrader] = Field(min_length=1, max_length=16)
    calculate_output: str = Field(min_length=1, max_length=2000)

    @field_validator("graders")
    @classmethod
    def _names_are_no_keywords(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if keyword.iskeyword(name):
                raise ValueError(f"{name!r} is a word that formulas know already")
        return value


Grader = Annotated[
    StringCheckGrader
    | TextSimilarityGrader
    | MathGrader
    | JsonSchemaGrader
    | PythonGrader
    | ScoreModelGrader
    | EndpointGrader
    | MultiGrader,
    Field(discriminator="type"),
]


def plain_graders(grader: Grader) -> list[Any]:
    """The graders that read samples: itself, or those of a ``multi``."""
    return list(grader.graders.values()) if isinstance(grader, MultiGrader) else [grader]


def templates(grader: Grader) -> Iterator[str]:
    """Every text of the grader that may hold ``{{...}}``."""
    for plain in plain_graders(grader):
        match plain:
            case ScoreModelGrader():
                yield from (message.content for message in plain.input)
            case StringCheckGrader() | TextSimilarityGrader() | MathGrader():
                yield from (plain.input, plain.reference)
            case JsonSchemaGrader():
                yield plain.input


def template_fields(grader: Grader) -> set[str]:
    """The names under ``item.`` that the grader's templates read: ``{{item.answer}}`` gives ``answer``."""
    paths = (path for text in templates(grader) for path in TEMPLATE.findall(text))
    return {re.split(r"[.\[]", path.removeprefix("item."))[0] for path in paths if path.startswith("item.")}


def secrets_of(grader: Grader) -> set[str]:
    """The names of the secrets that the grader needs."""
    needed = (
        plain.secret
        for plain in plain_graders(grader)
        if isinstance(plain, ScoreModelGrader | EndpointGrader)
    )
    return {name for name in needed if name is not None}
