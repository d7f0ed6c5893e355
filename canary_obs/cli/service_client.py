"""What commands ask a service over HTTP: the standard library's client, so that the core needs no other."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from canary_obs.cli.exit_codes import CommandFailed, ExitCode
from canary_obs.config import PREFIX, ClientConfig, load
from canary_obs.errors import ConfigurationError

_TOKEN_REMEDY = f"Give --token-file FILE, or set {PREFIX}TOKEN_FILE or {PREFIX}TOKEN."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response: status and its JSON."""

    status: int
    content: Any


class ServiceClient:
    """One service. A request that fails raises CommandFailed with one line; see `request`."""

    def __init__(self, url: str, token: str, seconds: float) -> None:
        """Raises ConfigurationError for a URL that is none."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            remedy = "Use http://HOST:PORT, the address that `canary-obs serve` prints."
            raise ConfigurationError("--url", url, "not the URL of a service", remedy)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._kind, self._host, self._port, self._path = kind, parts.hostname, port, parts.path.rstrip("/")
        self._token, self._seconds = token, seconds

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path; parameters that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return self.request("GET", f"{path}?{urlencode(given)}" if given else path).content

    def post(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        """Send a command; members that are None or empty are left out."""
        given = {name: value for name, value in (body or {}).items() if value not in (None, (), [])}
        return self.request("POST", path, given, seconds=seconds).content

    def delete(self, path: str) -> Any:
        """Take something back, or cancel it."""
        return self.request("DELETE", path).content

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        accepted: tuple[int, ...] = (),
        seconds: float | None = None,
    ) -> Answer:
        """An answer below 400, or one whose status is accepted.

        Raises CommandFailed: BLIND when nothing answers, REFUSED without a right token, else FAILED.
        """
        connection = self._connect(seconds)
        try:
            connection.request(method, self._path + path, *self._message(body))
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()
        content = self._parsed(raw, path)
        if response.status >= 400 and response.status not in accepted:
            raise self._refusal(response.status, content)
        return Answer(status=response.status, content=content)

    def date(self) -> str | None:
        """The Date header of an answer that needs no token."""
        connection = self._connect(None)
        try:
            connection.request("GET", f"{self._path}/healthz")
            return connection.getresponse().getheader("date")
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()

    def events(self, seconds: float | None) -> Iterator[tuple[str, Any]]:
        """Events by kind as the service sends them, for so long, or until it ends the stream."""
        until = None if seconds is None else time.monotonic() + seconds
        connection = self._connect(None)
        try:
            connection.request("GET", f"{self._path}/canary/events", headers=self._message(None)[1])
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refusal(response.status, self._parsed(response.read(), "/canary/events"))
            kind = ""
            while True:
                if until is not None and connection.sock is not None:
                    connection.sock.settimeout(max(0.001, until - time.monotonic()))
                try:
                    line = response.readline()
                except TimeoutError:
                    if until is None:  # no heartbeat for longer than an answer may take
                        raise
                    return
                if not line or (until is not None and time.monotonic() > until):
                    return
                name, _, value = line.decode(errors="replace").rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()

    def _connect(self, seconds: float | None) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=self._seconds if seconds is None else seconds)

    def _message(self, body: dict[str, Any] | None) -> tuple[bytes | None, dict[str, str]]:
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is None:
            return None, headers
        return json.dumps(body).encode(), headers | {"Content-Type": "application/json"}

    def _parsed(self, raw: bytes, path: str) -> Any:
        try:
            return json.loads(raw) if raw else {}
        except ValueError:
            text = f"{self.url}{path} answers, but not as a service of canary_obs; check --url"
            raise CommandFailed(ExitCode.BLIND, text) from None

    def _no_answer(self, error: Exception) -> CommandFailed:
        why = "no answer in time" if isinstance(error, TimeoutError) else _reason_of(error)
        text = f"no service answers at {self.url}: {why}. Start `canary-obs serve`, or give --url."
        return CommandFailed(ExitCode.BLIND, text)

    def _refusal(self, status: int, content: Any) -> CommandFailed:
        document = content if isinstance(content, dict) else {}
        detail = document.get("detail") or http.client.responses.get(status, "refused")
        if status == 401:
            return CommandFailed(ExitCode.REFUSED, f"{self.url}: {detail}. {_TOKEN_REMEDY}")
        code = ExitCode.BLIND if document.get("type", "").endswith(":no-engine") else ExitCode.FAILED
        return CommandFailed(code, f"{detail} ({status})")


def client_of(url: str | None = None, token_file: Path | None = None) -> ServiceClient:
    """The service that flags and the environment name. Raises ConfigurationError."""
    given = {"url": url, "token_file": None if token_file is None else str(token_file)}
    config = load(ClientConfig, overrides={name: value for name, value in given.items() if value is not None})
    token = read_token(config.token_file) if config.token_file else config.token.strip()
    address = config.url or f"http://127.0.0.1:{config.port}"
    return ServiceClient(address, token, config.client_seconds)


def read_token(path: str) -> str:
    """The token in a file. Raises ConfigurationError; the token is not shown."""
    remedy = "Name a file that holds the token alone."
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ConfigurationError("token_file", path, rule, remedy) from None
    except UnicodeDecodeError:
        raise ConfigurationError("token_file", path, "is not text", remedy) from None
    if not token or len(token.split()) > 1 or not token.isascii():
        raise ConfigurationError("token_file", path, "does not hold one token", remedy)
    return token


def _reason_of(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "nobody knows this host name"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
