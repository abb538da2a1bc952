"""Requests to tenants' URLs, against a real server on this machine."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.workers.graders.servers import Answer, Server, serving
from workers import outside
from workers.outside import ANSWER_BYTES, TRIES, Door, OutsideError, Trouble, check_url, is_public, sign

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    monkeypatch.setattr(outside, "BACKOFF_S", 0.0)


@pytest.fixture
def echo(private: None) -> Iterator[Server]:
    with serving(lambda asked: Answer(asked.body)) as server:
        yield server


def post(url: str, body: Any = None, timeout_s: float = 30.0, **secrets: str) -> Any:
    async def ask() -> Any:
        async with Door(url) as door:
            return await door.post(body, timeout_s=timeout_s, **secrets)

    return asyncio.run(ask())


def trouble(url: str, timeout_s: float = 30.0, **secrets: str) -> OutsideError:
    with pytest.raises(OutsideError) as found:
        post(url, {}, timeout_s, **secrets)
    return found.value


# ---------------------------------------------------------------- what goes out and comes in


def test_a_body_is_posted_and_the_answer_read(echo: Server) -> None:
    assert post(f"{echo.url}/a?b=c", {"text": "ä\U0001f600", "n": [1, None]}) == {
        "text": "ä\U0001f600",
        "n": [1, None],
    }
    (asked,) = echo.asked
    assert asked.path == "/a?b=c"
    assert asked.headers["host"] == f"127.0.0.1:{echo.port}"
    assert asked.headers["content-type"] == "application/json"
    assert "authorization" not in asked.headers
    assert "webhook-signature" not in asked.headers


def test_a_name_is_resolved_and_stays_the_host(echo: Server) -> None:
    assert post(f"http://localhost:{echo.port}/", 1) == 1
    assert echo.asked[0].headers["host"] == f"localhost:{echo.port}"


def test_a_key_is_sent_and_never_shown(echo: Server) -> None:
    post(echo.url, {}, bearer="sk-1\n")
    assert echo.asked[0].headers["authorization"] == "Bearer sk-1"
    for key in ("sk\r\nx: y", "", "schlüssel"):
        found = trouble(echo.url, bearer=key)
        assert found.kind is Trouble.SECRET
        assert not key or key not in str(found)
    assert len(echo.asked) == 1


def test_proxies_of_the_environment_are_not_used(echo: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert post(echo.url, 1) == 1


def test_half_a_character_is_sent_as_a_question_mark(echo: Server) -> None:
    assert post(echo.url, "\ud800") == "?"


def test_what_is_no_json_is_not_sent(echo: Server) -> None:
    with pytest.raises(OutsideError) as found:
        post(echo.url, {"n": float("inf")})
    assert found.value.kind is Trouble.NOT_JSON
    assert echo.asked == []


# ---------------------------------------------------------------- signatures


def test_the_signature_is_that_of_standard_webhooks() -> None:
    # The example of the specification's own libraries.
    body = b'{"test": 2432232314}'
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert sign(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == expected
    assert sign(SECRET.removeprefix("whsec_"), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == expected


def test_a_request_is_signed_over_its_very_bytes(echo: Server) -> None:
    post(echo.url, {"text": "ä"}, signing_secret=SECRET)
    (asked,) = echo.asked
    signed = b".".join(
        (asked.headers["webhook-id"].encode(), asked.headers["webhook-timestamp"].encode(), asked.body)
    )
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert asked.headers["webhook-signature"] == f"v1,{digest}"
    other = hmac.new(b"another key, as long", signed, hashlib.sha256).digest()
    assert asked.headers["webhook-signature"] != f"v1,{base64.b64encode(other).decode()}"


@pytest.mark.parametrize("secret", ["", "whsec_", "not base64!", "whsec_YWJj", "ключ"])
def test_a_secret_that_no_library_could_verify_with_is_refused(echo: Server, secret: str) -> None:
    found = trouble(echo.url, signing_secret=secret)
    assert found.kind is Trouble.SECRET
    assert "whsec_ and base64" in str(found)
    assert echo.asked == []


# ---------------------------------------------------------------- answers that are none


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (Answer(b"<html>"), Trouble.NOT_JSON, "answered no JSON: '<html>'"),
        (Answer(b""), Trouble.NOT_JSON, "answered no JSON: ''"),
        (Answer(b"\xff\xfe\x00"), Trouble.NOT_JSON, "answered no JSON"),
        (Answer(b"[" * 100_000), Trouble.NOT_JSON, "answered no JSON"),
        (Answer(b"9" * 10_000), Trouble.NOT_JSON, "answered no JSON"),
        (Answer(b" " * (10 << 20)), Trouble.TOO_LARGE, "more than 1,048,576 bytes"),
        (Answer(b"{}", 404), Trouble.STATUS, "answered with status 404"),
        (Answer(b"{}", 302, {"location": "/"}), Trouble.STATUS, "answered with a redirect (302)"),
        (
            Answer(gzip.compress(b"0" * 1000), 200, {"content-encoding": "gzip"}),
            Trouble.NOT_JSON,
            "answered compressed",
        ),
    ],
)
def test_an_answer_of_no_use_is_a_typed_error(
    private: None, answer: Answer, kind: Trouble, text: str
) -> None:
    with serving(lambda asked: answer) as server:
        found = trouble(server.url)
        assert found.kind is kind
        assert text in str(found)
        assert len(server.asked) == 1  # asking again would change nothing, and no redirect was followed


def test_the_longest_answer_is_read(private: None) -> None:
    body = b'"' + b"a" * (ANSWER_BYTES - 2) + b'"'
    with serving(lambda asked: Answer(body)) as server:
        assert len(post(server.url)) == ANSWER_BYTES - 2


@pytest.mark.parametrize("answer", [Answer(b'{"a":', stall=True), Answer(b"", stall=True)])
def test_a_body_that_does_not_end_is_given_up(private: None, answer: Answer) -> None:
    with serving(lambda asked: answer) as server:
        found = trouble(server.url, timeout_s=0.3)
    assert (found.kind, str(found)) == (Trouble.TIMEOUT, "127.0.0.1 gave no answer in 0.3 s")


def test_a_request_that_is_too_long_is_not_sent(echo: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "REQUEST_BYTES", 100)
    with pytest.raises(OutsideError) as found:
        post(echo.url, "a" * 100)
    assert found.value.kind is Trouble.TOO_LARGE
    assert echo.asked == []


# ---------------------------------------------------------------- asking again


@pytest.mark.parametrize(
    "first", [Answer(b"", 503), Answer(b"", 429, {"retry-after": "0"}), Answer(hang_up=True)]
)
def test_what_may_pass_is_asked_again_under_the_same_id(private: None, first: Answer) -> None:
    answers = iter([first, Answer(b"7")])
    with serving(lambda asked: next(answers)) as server:
        assert post(server.url, signing_secret=SECRET) == 7
        ids = [asked.headers["webhook-id"] for asked in server.asked]
    assert len(ids) == 2
    assert len(set(ids)) == 1


def test_what_does_not_pass_is_an_error_after_a_few_tries(private: None) -> None:
    with serving(lambda asked: Answer(b"", 500)) as server:
        found = trouble(server.url)
        assert len(server.asked) == TRIES
    assert (found.kind, str(found)) == (Trouble.STATUS, "127.0.0.1 answered with status 500")


def test_a_wait_that_is_asked_for_ends_with_the_time_limit(private: None) -> None:
    with serving(lambda asked: Answer(b"", 429, {"retry-after": "3600"})) as server:
        assert trouble(server.url, timeout_s=0.3).kind is Trouble.TIMEOUT
        assert len(server.asked) == 1


def test_a_port_where_nobody_listens_is_unreachable(private: None) -> None:
    with socket.socket() as taken:  # bound, and never listening
        taken.bind(("127.0.0.1", 0))
        found = trouble(f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert found.kind is Trouble.UNREACHABLE
    assert "127.0.0.1 cannot be reached" in str(found)


def test_the_next_address_is_tried(echo: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def two(host: str, port: int) -> list[Any]:
        return [ipaddress.ip_address("127.0.0.2"), ipaddress.ip_address("127.0.0.1")]

    monkeypatch.setattr(outside, "public_addresses", two)  # the server listens at the second only
    assert post(f"http://two.example:{echo.port}/", 1) == 1


# ---------------------------------------------------------------- certificates


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of its own for tls.example, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tls.example")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("tls.example")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file.write_bytes(key.private_bytes(pem, *plain) + made.public_bytes(pem))
    return file


def test_a_certificate_is_checked_for_the_name_not_for_the_address(
    private: None, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(outside, "certificates", lambda: trusted)
    resolve_to(monkeypatch, ["127.0.0.1"])
    with serving(lambda asked: Answer(b"7"), certificate=certificate) as server:
        assert post(f"https://tls.example:{server.port}/") == 7
        found = trouble(f"https://other.example:{server.port}/")
        assert found.kind is Trouble.UNREACHABLE
        assert "certificate" in str(found)
        assert len(server.asked) == 1


# ---------------------------------------------------------------- which addresses


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "LOCALHOST.",
        "db.localhost",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[fd00::1]",
        "[fec0::1]",
        "[ff02::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    ],
)
def test_an_address_that_is_not_public_is_refused_at_submit(host: str) -> None:
    with pytest.raises(OutsideError, match="no public address") as found:
        check_url(f"http://{host}:8000/grade")
    assert found.value.kind is Trouble.REFUSED_URL


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1"])
def test_an_address_in_disguise_is_refused_before_it_is_connected_to(host: str) -> None:
    with serving(lambda asked: Answer()) as server:
        found = trouble(f"http://{host}:{server.port}/")
        assert found.kind is Trouble.REFUSED_URL
        assert server.asked == []


def test_a_name_of_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda asked: Answer()) as server:
        resolve_to(monkeypatch, ["93.184.215.14", "127.0.0.1"])
        found = trouble(f"http://rebinding.example:{server.port}/")
        assert str(found).startswith("rebinding.example is 127.0.0.1, which is no public address")
        assert server.asked == []


def test_the_checked_address_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that points elsewhere a moment later leads nowhere else."""
    asked: list[str] = []

    async def ask(door: Door, address: str, content: bytes, headers: Any) -> Any:
        asked.append(address)

    resolve_to(monkeypatch, ["93.184.215.14"])
    monkeypatch.setattr(Door, "_ask", ask)
    post("http://rebinding.example/")
    assert asked == ["93.184.215.14"]


def resolve_to(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    def found(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d70e"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://user:word@example.com/", "keep it in a secret"),
        ("ftp://example.com/", "must be http"),
        ("http:///path", "name a host"),
        ("http://exa mple.com:port/", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_asked_is_refused(url: str, text: str) -> None:
    with pytest.raises(OutsideError, match=text) as found:
        check_url(url)
    assert found.value.kind is Trouble.REFUSED_URL
    assert "word" not in str(found.value) or "password" in str(found.value)


def test_json_that_only_python_reads_is_left_to_the_caller(private: None) -> None:
    with serving(lambda asked: Answer(b'{"score": NaN}')) as server:
        assert json.dumps(post(server.url)) == '{"score": NaN}'
