"""The only way to URLs that tenants name: graders and environments of their own, models that grade.

    Door(url).post(body) ─► resolve the host ─► refuse addresses that are not public
                                             ─► connect to the checked address, not to the name again
                         ◄─ JSON of at most ANSWER_BYTES; redirects are not followed, proxies not used

A tenant may name any URL, and our own database, the cloud's metadata and the services of a private network
are a URL away. ``JIGSAW_PRIVATE_URLS=allow`` lets an operator whose network is the tenants' too allow them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import os
import random
import socket
import time
import uuid
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from ssl import SSLContext
from typing import Any

import httpx

ANSWER_BYTES = 1 << 20
REQUEST_BYTES = 8 << 20
#: Tries of one request: more only when no connection was had, or for RETRY_STATUS.
TRIES = 3
RETRY_STATUS = frozenset({429, 500, 502, 503, 504})
BACKOFF_S = 0.5
#: How long each of the host's first ADDRESSES may take to connect.
CONNECT_S = 10.0
ADDRESSES = 3
#: IPv6 addresses in which NAT64 carries IPv4 ones (RFC 6052), and those that are the internet's own.
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_V6 = ipaddress.ip_network("2000::/3")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Trouble(StrEnum):
    """Why there is no answer."""

    SECRET = "secret"
    REFUSED_URL = "refused_url"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    STATUS = "status"
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"


class OutsideError(Exception):
    """No answer; the text is for the customer, and holds no secret."""

    def __init__(self, kind: Trouble, message: str, *, again: bool = False, wait_s: float = 0.0):
        super().__init__(message)
        self.kind = kind
        self.again, self.wait_s = again, wait_s  # whether another try may help, and how soon


class Door:
    """Connections to one URL, for one event loop; ``async with`` closes them.

    One URL each: connections are kept by address, and another host at the same address is another server.
    """

    def __init__(self, url: str):
        check_url(url)
        self._url = httpx.URL(url)
        self._client = httpx.AsyncClient(
            verify=certificates(),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # the whole has its own
        )

    async def __aenter__(self) -> Door:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def post(
        self,
        body: Any,
        *,
        timeout_s: float,
        bearer: str | None = None,
        signing_secret: str | None = None,
    ) -> Any:
        """The JSON that the server answers to the JSON ``body``, within ``timeout_s`` over all tries.

        ``bearer``: an API key. ``signing_secret``: signs by Standard Webhooks; every try has the same
        ``webhook-id``. Raises OutsideError.
        """
        try:
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode(errors="replace")
        except ValueError:
            raise OutsideError(
                Trouble.NOT_JSON, "the request holds a number that JSON cannot write"
            ) from None
        if len(content) > REQUEST_BYTES:
            raise OutsideError(Trouble.TOO_LARGE, f"the request is longer than {REQUEST_BYTES:,} bytes")
        headers = {"content-type": "application/json", "accept": "application/json"}
        if bearer is not None:
            headers["authorization"] = f"Bearer {checked_key(bearer)}"
        try:
            async with asyncio.timeout(timeout_s):
                return await self._tries(content, headers, signing_secret)
        except TimeoutError:
            raise OutsideError(Trouble.TIMEOUT, f"{self._host} gave no answer in {timeout_s:g} s") from None

    @property
    def _host(self) -> str:
        return self._url.host

    async def _tries(self, content: bytes, headers: Mapping[str, str], secret: str | None) -> Any:
        message_id = f"msg_{uuid.uuid4().hex}"
        for attempt in range(TRIES):
            signed = (
                {} if secret is None else signature_headers(secret, message_id, int(time.time()), content)
            )
            try:
                return await self._once(content, {**headers, **signed})
            except OutsideError as error:
                if not error.again or attempt == TRIES - 1:
                    raise
                backoff = BACKOFF_S * 2**attempt * (1 + random.random())
                await asyncio.sleep(max(error.wait_s, backoff))
        raise AssertionError

    async def _once(self, content: bytes, headers: Mapping[str, str]) -> Any:
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        failure = ""
        for address in (await public_addresses(self._url.raw_host.decode(), port))[:ADDRESSES]:
            try:
                return await self._ask(str(address), content, headers)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # the host's next address may do
                failure = str(error) or type(error).__name__
            except httpx.HTTPError as error:
                failure = str(error) or type(error).__name__
                break
        raise OutsideError(Trouble.UNREACHABLE, f"{self._host} cannot be reached: {failure}", again=True)

    async def _ask(self, address: str, content: bytes, headers: Mapping[str, str]) -> Any:
        request = self._client.build_request(
            "POST",
            self._url.copy_with(host=address),
            content=content,
            headers={**headers, "host": self._url.netloc.decode(), "accept-encoding": "identity"},
            # The certificate is checked for the name, not for the address.
            extensions={"sni_hostname": self._url.raw_host.decode()},
        )
        response = await self._client.send(request, stream=True)
        try:
            self._check_status(response)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise OutsideError(
                    Trouble.NOT_JSON, f"{self._host} answered compressed, and was asked not to"
                )
            return self._as_json(await self._body(response))
        finally:
            await response.aclose()

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if 300 <= status < 400:
            raise OutsideError(
                Trouble.STATUS, f"{self._host} answered with a redirect ({status}), and none is followed"
            )
        if not 200 <= status < 300:
            again = status in RETRY_STATUS
            wait_s = retry_after(response) if again else 0.0
            raise OutsideError(
                Trouble.STATUS, f"{self._host} answered with status {status}", again=again, wait_s=wait_s
            )

    async def _body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > ANSWER_BYTES:
                raise OutsideError(
                    Trouble.TOO_LARGE, f"{self._host} answered with more than {ANSWER_BYTES:,} bytes"
                )
        return bytes(body)

    def _as_json(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            shown = body[:100].decode(errors="replace")
            raise OutsideError(Trouble.NOT_JSON, f"{self._host} answered no JSON: {shown!r}") from None


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 when it does not say so as a number."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0


@cache
def certificates() -> SSLContext:
    return httpx.create_ssl_context()


# ---------------------------------------------------------------- addresses


def private_allowed() -> bool:
    return os.environ.get("JIGSAW_PRIVATE_URLS", "") == "allow"


def check_url(url: str) -> None:
    """Refuse a URL that could never be asked, without asking the network. Raises OutsideError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise OutsideError(Trouble.REFUSED_URL, f"the URL cannot be read: {error}") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise OutsideError(Trouble.REFUSED_URL, "the URL must be http:// or https:// and name a host")
    if parsed.userinfo:
        raise OutsideError(
            Trouble.REFUSED_URL, "the URL holds a user or a password: keep it in a secret instead"
        )
    if private_allowed():
        return
    name = parsed.host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        raise refused(parsed.host, "this machine")
    try:
        address = ipaddress.ip_address(parsed.host)
    except ValueError:
        return
    if not is_public(address):
        raise refused(parsed.host, str(address))


async def public_addresses(host: str, port: int) -> list[Address]:
    """The host's addresses, in the resolver's order. Raises OutsideError if one of them is not public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OutsideError(
            Trouble.UNREACHABLE, f"{host} has no address that can be found: {error}", again=True
        ) from None
    addresses = list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in found))
    if not private_allowed():
        for address in addresses:
            if not is_public(address):
                raise refused(host, str(address))
    return addresses


def is_public(address: Address) -> bool:
    """Whether the address is one of the internet's; of one that carries an IPv4 address, whether that is."""
    if isinstance(address, ipaddress.IPv6Address):
        carried = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            carried = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if carried is not None:
            return is_public(carried)
        if address not in GLOBAL_V6:
            return False
    return address.is_global and not address.is_multicast


def refused(host: str, address: str) -> OutsideError:
    return OutsideError(
        Trouble.REFUSED_URL,
        f"{host} is {address}, which is no public address; this server asks public addresses only",
    )


# ---------------------------------------------------------------- secrets


def checked_key(key: str) -> str:
    """An API key as a header can carry it. Raises OutsideError, which does not show it."""
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise OutsideError(Trouble.SECRET, "the secret cannot be an API key: it is empty, or not plain text")
    return key


def sign(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """The ``webhook-signature`` of Standard Webhooks: https://www.standardwebhooks.com

    ``secret`` is base64, with or without its ``whsec_``, as the libraries take it. Raises OutsideError.
    """
    try:
        key = base64.b64decode(secret.strip().removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) < 16:
        raise OutsideError(
            Trouble.SECRET, "the signing secret must be whsec_ and base64 of 24 to 64 random bytes"
        )
    signed = hmac.new(key, b".".join((id.encode(), str(timestamp).encode(), body)), hashlib.sha256)
    return f"v1,{base64.b64encode(signed.digest()).decode()}"


def signature_headers(secret: str, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secret, id, timestamp, body),
    }
