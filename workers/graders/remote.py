"""Graders that ask a server: a language model's opinion, and a tenant's own endpoint.

samples ─► REQUESTS_AT_ONCE at a time ─► workers.outside.Door ─► score, or a typed error
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.graders.grades import (
    ErrorType,
    GradeError,
    GradeInput,
    GradeResult,
    as_sample,
    checked_score,
)
from workers.graders.templates import Filler
from workers.outside import Door, OutsideError
from workers.spec import EndpointGrader, ScoreModelGrader

REQUESTS_AT_ONCE = 16
#: How often a batch looks whether it is to end.
WATCH_S = 0.5
OUTPUT_CHARS = 2_000
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
#: What makes a last number a part of something else: "4/5", "4 out of 5", "0,8", "1,000", "3-4", "1.2.3".
PART_OF = re.compile(r"\d(?:\s*(?:/|out of|of)\s*|,?)$", re.IGNORECASE)

RemoteGrader = ScoreModelGrader | EndpointGrader


def grade_remote(
    grader: RemoteGrader,
    samples: Sequence[GradeInput],
    secrets: Mapping[str, str],
    stopped: Callable[[], bool],
) -> list[GradeResult]:
    """One result for each sample, in order. Runs an event loop of its own: call it outside of one.

    Once ``stopped`` says so, requests under way are given up, and none begins.
    """
    if not samples:
        return []
    try:
        secret = find_secret(grader.secret, secrets)
        return asyncio.run(grade_all(grader, samples, secret, stopped))
    except (GradeError, OutsideError) as error:  # it concerns all of them
        return [failed(error, 0.0)] * len(samples)


async def grade_all(
    grader: RemoteGrader, samples: Sequence[GradeInput], secret: str | None, stopped: Callable[[], bool]
) -> list[GradeResult]:
    free = asyncio.Semaphore(REQUESTS_AT_ONCE)
    url = f"{grader.url.rstrip('/')}/chat/completions" if isinstance(grader, ScoreModelGrader) else grader.url
    async with Door(url) as door:
        tasks = [asyncio.create_task(grade_one(grader, sample, secret, door, free)) for sample in samples]
        waiting = set(tasks)
        while waiting and not stopped():
            _, waiting = await asyncio.wait(waiting, timeout=WATCH_S)
        for task in waiting:
            task.cancel()
        await asyncio.wait(tasks)
    ended = GradeResult(None, "the grading was cancelled", ErrorType.SANDBOX)
    return [ended if task.cancelled() else task.result() for task in tasks]


async def grade_one(
    grader: RemoteGrader, sample: GradeInput, secret: str | None, door: Door, free: asyncio.Semaphore
) -> GradeResult:
    async with free:
        start = time.monotonic()
        try:
            if isinstance(grader, ScoreModelGrader):
                score, output, tokens = await ask_model(grader, sample, secret, door)
            else:
                score, output, tokens = await ask_endpoint(grader, sample, secret, door), "", {}
        except (GradeError, OutsideError) as error:
            return failed(error, time.monotonic() - start)
        return GradeResult(score, seconds=time.monotonic() - start, output=output, tokens=tokens)


def failed(error: GradeError | OutsideError, seconds: float) -> GradeResult:
    kind = error.type if isinstance(error, GradeError) else ErrorType(error.kind)
    return GradeResult(None, str(error), kind, seconds)


def find_secret(name: str | None, secrets: Mapping[str, str]) -> str | None:
    if name is not None and name not in secrets:
        raise GradeError(ErrorType.SECRET, f"the organization has no secret named {name!r}")
    return None if name is None else secrets[name]


# ---------------------------------------------------------------- a language model


async def ask_model(
    grader: ScoreModelGrader, sample: GradeInput, secret: str | None, door: Door
) -> tuple[float, str, dict[str, int]]:
    """The score, what the model wrote, and the tokens that it took."""
    answer = await door.post(model_request(grader, sample), timeout_s=grader.timeout_s, bearer=secret)
    text = reply_text(answer)
    return read_score(text, grader.range), text[:OUTPUT_CHARS], used_tokens(answer, grader.model)


def model_request(grader: ScoreModelGrader, sample: GradeInput) -> dict[str, Any]:
    """The body of https://platform.openai.com/docs/api-reference/chat/create"""
    filler = Filler(sample)
    messages = [{"role": each.role, "content": filler.fill(each.content)} for each in grader.input]
    sampling = grader.model_dump(include={"max_tokens", "temperature", "top_p", "seed"}, exclude_none=True)
    return {"model": grader.model, "messages": messages, **sampling}


def reply_text(answer: Any) -> str:
    try:
        message = answer["choices"][0]["message"]
        refusal, text = message.get("refusal"), message["content"]
    except (LookupError, TypeError, AttributeError):
        raise GradeError(ErrorType.BAD_ANSWER, "the model's server answered no chat completion") from None
    if refusal:
        raise GradeError(ErrorType.REFUSAL, f"the model refused to grade: {str(refusal)[:200]}")
    if not isinstance(text, str):
        raise GradeError(ErrorType.BAD_ANSWER, "the model's reply has no text")
    return text


def read_score(text: str, bounds: tuple[float, float]) -> float:
    """The last number of a model's reply. Raises GradeError."""
    numbers = list(NUMBER.finditer(text))
    shown = repr(text[-100:])
    if not numbers:
        raise GradeError(ErrorType.BAD_SCORE, f"the model's reply holds no number: {shown}")
    last = numbers[-1]
    if PART_OF.search(text[: last.start()]):
        raise GradeError(
            ErrorType.BAD_SCORE, f"the model's reply ends in a fraction or a range, not in a score: {shown}"
        )
    score = checked_score(float(last[0]), "the model's score is")
    if not bounds[0] <= score <= bounds[1]:
        raise GradeError(
            ErrorType.BAD_SCORE,
            f"the model's score is {score:g}, outside of its range from {bounds[0]:g} to {bounds[1]:g}",
        )
    return score


def used_tokens(answer: Any, model: str) -> dict[str, int]:
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return {model: total} if isinstance(total, int) else {}


# ---------------------------------------------------------------- a tenant's endpoint


async def ask_endpoint(grader: EndpointGrader, sample: GradeInput, secret: str | None, door: Door) -> float:
    body = {"sample": as_sample(sample.output_text), "item": sample.item}
    answer = await door.post(body, timeout_s=grader.timeout_s, signing_secret=secret)
    if not isinstance(answer, dict) or "score" not in answer:
        raise GradeError(
            ErrorType.BAD_ANSWER, 'the endpoint\'s answer has no score: it must be {"score": a number}'
        )
    return checked_score(answer["score"], "the endpoint's score is")
