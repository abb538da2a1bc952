"""A tenant's own environment, in the sandbox and on a server of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.workers.envs.local import episode, play, settings
from workers.envs.own import check_environment
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.graders.pool import GraderPool

COUNTING = """
class Environment:
    def __init__(self, item, seed):
        self.goal, self.heard = item["goal"], []

    def step(self, turn):
        self.heard.append(turn)
        if len(self.heard) == self.goal:
            return {"observation": None, "reward": 1.0, "done": True}
        return {"observation": "+".join(self.heard), "reward": 0.25}
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    found = GraderPool()
    yield found
    found._sandbox.close()


def own(source: str, **fields):
    return settings(type="python", source=source, max_turns=8, **fields)


def test_an_episode_keeps_its_state_over_turns(pool):
    found = play(episode(own(COUNTING), {"goal": 3}, pool=pool), "a", "b", "c")
    assert [(each.text, each.reward) for each in found] == [("a", 0.25), ("a+b", 0.25), (None, 1.0)]


def test_a_killed_process_is_replaced_and_told_the_turns_anew():
    first, second = GraderPool(), GraderPool()
    try:
        game = episode(own(COUNTING), {"goal": 4}, pool=first)
        play(game, "a", "b")
        first._sandbox.close()
        object.__setattr__(game._inner._beginning.helpers.actor, "_actor", second)
        assert [each.text for each in play(game, "c")] == ["a+b+c"]
    finally:
        second._sandbox.close()


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        ("raise KeyError('lost')", EpisodeFailure.EXCEPTION, "lost"),
        ("return 7", EpisodeFailure.BAD_ANSWER, "expected a text"),
        ("return {'reward': float('nan')}", EpisodeFailure.BAD_ANSWER, None),
        ("return {'reward': True}", EpisodeFailure.BAD_ANSWER, "finite number"),
        ("return {'observation': 3}", EpisodeFailure.BAD_ANSWER, "not a text"),
        ("return 'x' * 10_000_000", EpisodeFailure.BAD_ANSWER, None),
        ("while True: pass", EpisodeFailure.TIMEOUT, None),
        ("import os; os._exit(0)", EpisodeFailure.CRASHED, None),
    ],
)
def test_what_goes_wrong_is_a_typed_failure_of_the_episode(pool, body, kind, reason):
    source = (
        "class Environment:\n"
        "    def __init__(self, item, seed): pass\n"
        f"    def step(self, turn):\n        {body}\n"
    )
    with pytest.raises(EpisodeFailed, match=reason) as failed:
        play(episode(own(source, timeout_s=1), {}, pool=pool), "hello")
    assert failed.value.kind is kind


@pytest.mark.parametrize("source", ["x = 1", "class Environment:\n    def step(self, turn): pass", "def ("])
def test_a_source_without_the_class_is_refused(source):
    with pytest.raises(ValueError, match=r"line|Environment"):
        check_environment(source)
    check_environment(COUNTING)


# ---------------------------------------------------------------- a server


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.heard.append((body, dict(self.headers)))  # type: ignore[attr-defined]
        answer = {"observation": f"{body['text']}!", "reward": 0.5, "done": body["turn"] == 2}
        if body["text"] == "break":
            answer = ["no", "observation"]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.heard = []  # type: ignore[attr-defined]
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def remote(server: ThreadingHTTPServer):
    return settings(type="remote", url=f"http://127.0.0.1:{server.server_port}/step", secret="world")


SECRETS = {"world": "whsec_" + "c2VjcmV0IG9mIHRoZSB3b3JsZCwgMzIgYnl0ZXMh"}


def test_a_server_is_told_each_turn_signed(server, monkeypatch):
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    game = episode(remote(server), {"goal": 1}, stream=(5, 0, 1, 2), secrets=SECRETS)
    found = play(game, "one", "two")
    assert [(each.text, each.reward) for each in found] == [("one!", 0.5), (None, 0.5)]
    (first, headers), (second, _) = server.heard
    assert (first["episode"], first["turn"], first["text"], first["item"]) == (
        "5-0-1-2",
        1,
        "one",
        {"goal": 1},
    )
    assert second["turn"] == 2
    assert headers["webhook-signature"].startswith("v1,")


def test_a_private_address_is_refused_unless_allowed(server, monkeypatch):
    monkeypatch.delenv("JIGSAW_PRIVATE_URLS", raising=False)
    with pytest.raises(EpisodeFailed) as failed:
        play(episode(remote(server), {}, secrets=SECRETS), "one")
    assert failed.value.kind is EpisodeFailure.UNREACHABLE
    assert server.heard == []


def test_an_answer_that_is_no_observation_fails_the_episode(server, monkeypatch):
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    with pytest.raises(EpisodeFailed, match="expected a text") as failed:
        play(episode(remote(server), {}, secrets=SECRETS), "break")
    assert failed.value.kind is EpisodeFailure.BAD_ANSWER
