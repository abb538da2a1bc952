"""Graders that ask servers, against a real one on this machine."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.graders.servers import Answer, Asked, Server, serving
from workers import outside
from workers.graders import remote
from workers.graders.grades import ErrorType, GradeInput, GradeResult
from workers.graders.run import grade_batch
from workers.spec import EndpointGrader, ScoreModelGrader
from workers.spec.graders import ModelMessage

SIGNING = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    monkeypatch.setattr(outside, "BACKOFF_S", 0.0)


def endpoint(url: str, **settings: Any) -> EndpointGrader:
    return EndpointGrader(type="endpoint", url=url, secret="signing", **settings)


def ask(grader: EndpointGrader | ScoreModelGrader, *texts: str, item: Any = None) -> list[GradeResult]:
    samples = [GradeInput(item or {}, text) for text in texts]
    return grade_batch(grader, samples, secrets={"signing": SIGNING, "key": "sk-test"})


# ---------------------------------------------------------------- a tenant's endpoint


def test_an_endpoint_gets_the_sample_and_the_row_and_scores() -> None:
    def answer(asked: Asked) -> Answer:
        body = json.loads(asked.body)
        return Answer(json.dumps({"score": len(body["sample"]["output_text"]) + body["item"]["n"]}).encode())

    with serving(answer) as server:
        results = ask(endpoint(f"{server.url}/grade"), "four", '{"a": 1}', item={"n": 0.5})
        bodies = [json.loads(asked.body) for asked in server.asked]
    assert [result.score for result in results] == [4.5, 8.5]
    assert {"sample": {"output_text": "four"}, "item": {"n": 0.5}} in bodies
    assert {"sample": {"output_text": '{"a": 1}', "output_json": {"a": 1}}, "item": {"n": 0.5}} in bodies
    assert all(result.seconds > 0 for result in results)


@pytest.mark.parametrize("text", ["NaN", '{"a": -Infinity}', "[1e999]", "[" * 100_000, "9" * 10_000])
def test_a_completion_that_others_could_not_read_as_json_is_sent_as_text(text: str) -> None:
    with serving(lambda asked: Answer(b'{"score": 1}')) as server:
        assert ask(endpoint(server.url), text)[0].score == 1.0
        assert json.loads(server.asked[0].body)["sample"] == {"output_text": text}


def test_an_empty_batch_asks_nobody() -> None:
    assert ask(endpoint("http://127.0.0.1:9/")) == []


def test_an_endpoint_that_checks_signatures_knows_ours_and_no_other() -> None:
    def verify(asked: Asked) -> Answer:
        key = base64.b64decode(SIGNING.removeprefix("whsec_"))
        signed = ".".join(
            (asked.headers["webhook-id"], asked.headers["webhook-timestamp"], asked.body.decode())
        )
        digest = base64.b64encode(hmac.new(key, signed.encode(), hashlib.sha256).digest()).decode()
        known = asked.headers["webhook-signature"] == f"v1,{digest}"
        return Answer(b'{"score": 1}') if known else Answer(b"who are you", 401)

    with serving(verify) as server:
        grader = endpoint(server.url)
        assert ask(grader, "a")[0].score == 1.0
        other = {"signing": "whsec_" + base64.b64encode(b"x" * 24).decode()}
        (result,) = grade_batch(grader, [GradeInput({}, "a")], secrets=other)
    assert (result.score, result.error_type) == (None, ErrorType.STATUS)
    assert result.error == "127.0.0.1 answered with status 401"


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b'{"score": NaN}', ErrorType.BAD_SCORE, "the endpoint's score is nan: a score is a finite number"),
        (b'{"score": -Infinity}', ErrorType.BAD_SCORE, "the endpoint's score is -inf"),
        (b'{"score": 1' + b"0" * 400 + b"}", ErrorType.BAD_SCORE, "the endpoint's score is inf"),
        (b'{"score": 1e7}', ErrorType.BAD_SCORE, "between -1,000,000 and 1,000,000"),
        (b'{"score": "1"}', ErrorType.BAD_SCORE, 'the endpoint\'s score is "1": a score is a number'),
        (b'{"score": null}', ErrorType.BAD_SCORE, "the endpoint's score is null"),
        (b'{"score": true}', ErrorType.BAD_SCORE, "the endpoint's score is true"),
        (b'{"reward": 1}', ErrorType.BAD_ANSWER, 'it must be {"score": a number}'),
        (b"1", ErrorType.BAD_ANSWER, 'it must be {"score": a number}'),
        (b"ok", ErrorType.NOT_JSON, "answered no JSON: 'ok'"),
        (b" " * (10 << 20), ErrorType.TOO_LARGE, "more than 1,048,576 bytes"),
    ],
)
def test_an_answer_without_a_score_is_a_typed_error(body: bytes, kind: ErrorType, text: str) -> None:
    with serving(lambda asked: Answer(body)) as server:
        (result,) = ask(endpoint(server.url), "a")
    assert (result.score, result.error_type) == (None, kind)
    assert result.error is not None
    assert text in result.error


def test_a_sample_that_fails_leaves_the_others_their_scores() -> None:
    def answer(asked: Asked) -> Answer:
        text = json.loads(asked.body)["sample"]["output_text"]
        return Answer(b"{", stall=True) if text == "slow" else Answer(b'{"score": 1}')

    with serving(answer) as server:
        results = ask(endpoint(server.url, timeout_s=1.0), "a", "slow", "b")
    assert [result.score for result in results] == [1.0, None, 1.0]
    assert results[1].error_type is ErrorType.TIMEOUT
    assert results[1].error == "127.0.0.1 gave no answer in 1 s"


def test_requests_of_a_batch_run_side_by_side_and_not_all_at_once() -> None:
    most = remote.REQUESTS_AT_ONCE
    under_way, peak, lock = [0], [0], threading.Lock()
    full = threading.Barrier(most)

    def answer(asked: Asked) -> Answer:
        with lock:
            under_way[0] += 1
            peak[0] = max(peak[0], under_way[0])
        full.wait(30)  # only as many at a time let each other through
        with lock:
            under_way[0] -= 1
        return Answer(b'{"score": 1}')

    with serving(answer) as server:
        results = ask(endpoint(server.url), *["a"] * (3 * most))
    assert [result.score for result in results] == [1.0] * (3 * most)
    assert peak[0] == most


def test_a_batch_that_is_stopped_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WATCH_S", 0.01)
    begun = threading.Event()

    def answer(asked: Asked) -> Answer:
        if json.loads(asked.body)["sample"]["output_text"] == "quick":
            return Answer(b'{"score": 1}')
        begun.set()
        return Answer(b"", stall=True)

    with serving(answer) as server:
        results = grade_batch(
            endpoint(server.url, timeout_s=300),
            [GradeInput({}, "quick"), *[GradeInput({}, "slow")] * 40],
            secrets={"signing": SIGNING},
            stopped=begun.is_set,
        )
        assert len(server.asked) <= 1 + remote.REQUESTS_AT_ONCE
    assert {result.error_type for result in results[1:]} == {ErrorType.SANDBOX}
    assert results[1].error == "the grading was cancelled"


def test_a_secret_that_is_not_there_is_named() -> None:
    results = grade_batch(endpoint("http://127.0.0.1:9/"), [GradeInput({}, "a")] * 2, secrets={"other": "x"})
    assert [result.error_type for result in results] == [ErrorType.SECRET] * 2
    assert results[0].error == "the organization has no secret named 'signing'"


def test_a_private_address_is_refused_unless_the_operator_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JIGSAW_PRIVATE_URLS")
    with serving(lambda asked: Answer(b'{"score": 1}')) as server:
        results = ask(endpoint(server.url), "a", "b")
        assert server.asked == []
    assert [result.error_type for result in results] == [ErrorType.REFUSED_URL] * 2
    assert results[0].error is not None
    assert results[0].error.startswith("127.0.0.1 is 127.0.0.1, which is no public address")


# ---------------------------------------------------------------- a language model


def judge(url: str, **settings: Any) -> ScoreModelGrader:
    prompt = "Grade {{sample.output_text}} against {{item.answer}}."
    return ScoreModelGrader(
        type="score_model",
        url=f"{url}/v1/",
        model="judge-1",
        input=(ModelMessage(role="system", content="Be fair."), ModelMessage(role="user", content=prompt)),
        **{"secret": "key", **settings},
    )


def reply(text: Any, **more: Any) -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}}
    return Answer(json.dumps({"choices": [choice], "usage": {"total_tokens": 17}}).encode())


@pytest.fixture
def seven() -> Iterator[Server]:
    with serving(lambda asked: reply("I think: 0.7")) as server:
        yield server


def test_a_model_is_asked_as_openais_clients_ask(seven: Server) -> None:
    (result,) = ask(judge(seven.url, seed=3, top_p=0.5), "Paris", item={"answer": "Rome"})
    assert (result.score, result.output, result.tokens) == (0.7, "I think: 0.7", {"judge-1": 17})
    (asked,) = seven.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer sk-test"
    assert json.loads(asked.body) == {
        "model": "judge-1",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Grade Paris against Rome."},
        ],
        "max_tokens": 256,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 3,
    }


def test_what_is_null_is_left_to_the_models_server(seven: Server) -> None:
    ask(judge(seven.url, max_tokens=None, temperature=None, secret=None), "Paris", item={"answer": "Rome"})
    assert json.loads(seven.asked[0].body).keys() == {"model", "messages"}
    assert "authorization" not in seven.asked[0].headers


def test_a_row_without_the_field_is_not_asked_about(seven: Server) -> None:
    (result,) = ask(judge(seven.url), "Paris")
    assert (result.error_type, result.error) == (
        ErrorType.TEMPLATE,
        "{{item.answer}}: the row has no item.answer",
    )
    assert seven.asked == []


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("0.25", 0.25),
        ("Step 1 of 3: fine. Step 2: fine.\n\nScore: **1.0**", 1.0),
        ('{"steps": [1, 2], "score": 1e-1}', 0.1),
        ("So it is .5.", 0.5),
        ("1. ", 1.0),
        ("The score is 1/2, that is 0.5", 0.5),
    ],
)
def test_the_last_number_is_the_score(text: str, score: float) -> None:
    assert remote.read_score(text, (0.0, 1.0)) == score


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (reply("good"), ErrorType.BAD_SCORE, "the model's reply holds no number: 'good'"),
        (reply("NaN"), ErrorType.BAD_SCORE, "holds no number"),
        (reply("7"), ErrorType.BAD_SCORE, "the model's score is 7, outside of its range from 0 to 1"),
        (reply("-0.1"), ErrorType.BAD_SCORE, "outside of its range"),
        (reply("1e999"), ErrorType.BAD_SCORE, "the model's score is inf"),
        (reply("0.8/1"), ErrorType.BAD_SCORE, "ends in a fraction"),
        (reply("0.8 out of 1."), ErrorType.BAD_SCORE, "ends in a fraction"),
        (reply("1,000"), ErrorType.BAD_SCORE, "ends in a fraction"),
        (reply("0,1"), ErrorType.BAD_SCORE, "ends in a fraction"),
        (reply("0-1"), ErrorType.BAD_SCORE, "ends in a fraction or a range"),
        (reply("1.0.1"), ErrorType.BAD_SCORE, "ends in a fraction"),
        (reply(None), ErrorType.BAD_ANSWER, "the model's reply has no text"),
        (reply(None, refusal="I cannot."), ErrorType.REFUSAL, "the model refused to grade: I cannot."),
        (Answer(b'{"choices": []}'), ErrorType.BAD_ANSWER, "answered no chat completion"),
        (Answer(b'{"error": "x"}'), ErrorType.BAD_ANSWER, "answered no chat completion"),
        (Answer(b"[]"), ErrorType.BAD_ANSWER, "answered no chat completion"),
        (Answer(b'{"choices": [{"message": 1}]}'), ErrorType.BAD_ANSWER, "answered no chat completion"),
        (Answer(b"", 401), ErrorType.STATUS, "127.0.0.1 answered with status 401"),
    ],
)
def test_a_reply_without_a_score_is_a_typed_error(answer: Answer, kind: ErrorType, text: str) -> None:
    with serving(lambda asked: answer) as server:
        (result,) = ask(judge(server.url), "Paris", item={"answer": "Rome"})
    assert (result.score, result.error_type) == (None, kind)
    assert result.error is not None
    assert text in result.error
    assert "sk-test" not in result.error
