"""Servers of object stores for tests: moto (S3) and, before it, a shim that speaks Google's preconditions; and
a proxy with the faults of HTTP. On ports that the kernel chooses, ended by their pid."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import HOST, held_port

BUCKET = "bucket"
Rule = Callable[[str, str, str, int], str]
"""Given the method, path and query of a request and its number, what happens to it: see `Proxy`."""


@contextmanager
def moto(started: list[subprocess.Popen[bytes]] | None = None) -> Iterator[int]:
    """Run moto's S3 with a bucket; yield its port. started: receives its process."""
    with held_port() as port:
        server = subprocess.Popen(
            [str(Path(sys.executable).with_name("moto_server")), "-H", HOST, "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "1000"},
        )
        if started is not None:
            started.append(server)
        try:
            ends = time.monotonic() + 60
            while True:
                with suppress(OSError):
                    assert request(port, "PUT", f"/{BUCKET}")[0] == 200
                    break
                assert time.monotonic() < ends, "moto did not start"
                assert server.poll() is None, "moto ended"
                time.sleep(0.05)
            yield port
        finally:
            server.kill()
            server.wait(30)


def request(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Make one request; moto checks no signature."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    try:
        about = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request",
            **headers,
        }
        connection.request(method, path, body, about)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def s3_environment(port: int) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
    }


def google_environment(port: int) -> dict[str, str]:
    key = f'{{"gcs_base_url": "http://{HOST}:{port}", "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}}'
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": key}


_ERRORS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "429": (429, "TooManyRequests", "Please reduce your request rate."),
    "409": (409, "ConditionalRequestConflict", "The conditional request cannot succeed."),
    "slow": (
        400,
        "RequestTimeout",
        "Your socket connection to the server was not read from or written to within the timeout period.",
    ),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
    "region": (
        301,
        "PermanentRedirect",
        "The bucket you are attempting to access must be addressed elsewhere.",
    ),
    "nobucket": (404, "NoSuchBucket", "The specified bucket does not exist"),
    "unknown": (501, "NotImplemented", "A header you provided implies functionality that is not implemented"),
    "200err": (200, "InternalError", "We encountered an internal error. Please try again."),
}


def hurry(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Have requests tried again at once, and given up soon if the fault is one that hangs. All other limits stay
    those of a user: on a busy machine a reply takes long."""
    from holdfast._core.store import object_client

    patch.setattr(object_client, "FIRST_PAUSE", 0.02)
    patch.setattr(object_client, "LONGEST_PAUSE", 0.1)
    if fault == "hang":
        patch.setattr(object_client, "READ", 1.0)


class Proxy:
    """Passes requests on to a server, or does what `rule` returns for one:

    pass; a name in _ERRORS: answered so, and not passed on; hang: no answer; drop: closed before the server saw
    it; lost: the server did it, and the reply is lost; cut: half of the body reaches the server; short: half of
    the reply's body comes; late:SECONDS: the client is cut off, and the server gets the request later.
    """

    def __init__(self, upstream: int, change: Callable[[Any], Any] | None = None) -> None:
        self.upstream, self.rule, self.change = upstream, _passes, change
        self._lock, self._seen = threading.Lock(), list[str]()
        self._open = set[socket.socket]()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # A reply goes in two writes, the second of which would wait 40 ms for the acknowledgement of the first.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with proxy._lock:
                    proxy._open.add(self.connection)

            def finish(self) -> None:
                with proxy._lock:
                    proxy._open.discard(self.connection)
                super().finish()

            def log_message(self, *_: object) -> None:
                pass

            def do(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do  # noqa: N815

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass

        self._server = Server((HOST, 0), Handler)
        self.port = self._server.server_address[1]
        self._stopped = threading.Event()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for connection in self._open:  # a client keeps its own, and the thread of each, for minutes
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def requests(self) -> list[str]:
        """Return the requests since the last such call, each as its method, what kind it is, and its fate."""
        with self._lock:
            seen, self._seen = self._seen, []
        return seen

    def counts(self) -> Counter[str]:
        return Counter(line.split()[0] for line in self.requests())

    def _handle(self, handler: Any) -> None:
        url = urllib.parse.urlsplit(handler.path)
        body = _body_of(handler)
        with self._lock:
            fate = self.rule(handler.command, url.path, url.query, len(self._seen)) or "pass"
            kind = "LIST" if handler.command == "GET" and "list-type" in url.query else handler.command
            self._seen.append(f"{kind} {urllib.parse.unquote(url.path)} {fate}")
        fate, _, argument = fate.partition(":")
        if fate == "hang":
            self._stopped.wait(60)
        if fate in ("hang", "drop"):
            return _close(handler)
        if fate in _ERRORS:
            status, code, message = _ERRORS[fate]
            text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
            return _answer(handler, status, [], text)
        if fate == "late":
            _close(handler)
            time.sleep(float(argument))
        if fate == "cut":
            with socket.create_connection((HOST, self.upstream)) as half:
                head = "".join(f"{name}: {value}\r\n" for name, value in handler.headers.items())
                half.sendall(f"{handler.command} {handler.path} HTTP/1.1\r\n{head}\r\n".encode())
                half.sendall(body[: len(body) // 2])
                time.sleep(0.1)
            return _close(handler)
        try:
            status, headers, data = self._upstream(handler, body)
        except OSError:
            return _close(handler)
        if fate in ("lost", "late"):
            return _close(handler)
        half_of = len(data) // 2 if fate == "short" else None
        _answer(handler, status, headers, data, half_of)
        if fate == "short":
            _close(handler)
        return None

    def _upstream(self, handler: Any, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        if self.change is not None:
            return self.change(
                Asked(self.upstream, handler.command, handler.path, dict(handler.headers), body)
            )
        # moto compares and writes in two steps, so that on a busy machine two conditions can hold at once.
        is_conditional = any(name.lower() in ("if-none-match", "if-match") for name in handler.headers)
        with _one_by_one if is_conditional and handler.command == "PUT" else nullcontext():
            return forward(self.upstream, handler.command, handler.path, dict(handler.headers), body)


_one_by_one = threading.Lock()


class Asked:
    """A request to a `change` of a proxy."""

    def __init__(self, port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.port, self.method, self.path, self.headers, self.body = port, method, path, headers, body


def forward(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "expect"):
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        connection.send(body)
        reply = connection.getresponse()
        return reply.status, reply.getheaders(), reply.read()
    finally:
        connection.close()


def _passes(*_: object) -> str:
    return "pass"


def _body_of(handler: Any) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return bytes(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)))
    body = b""
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return body


def _close(handler: Any) -> None:
    handler.close_connection = True
    with suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def _answer(
    handler: Any, status: int, headers: list[tuple[str, str]], data: bytes, half: int | None = None
) -> None:
    try:
        handler.send_response(status)
        left_out = ("transfer-encoding", "connection", "keep-alive", "server", "date")
        kept = [(name, value) for name, value in headers if name.lower() not in left_out]
        for name, value in kept:
            handler.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in kept):
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data[:half])
    except OSError:
        _close(handler)


def lies(asked: Any) -> Any:
    """A server that ignores conditions of writes, as some do."""
    headers = {
        name: value
        for name, value in asked.headers.items()
        if asked.method != "PUT" or name.lower() not in ("if-none-match", "if-match")
    }
    return forward(asked.port, asked.method, asked.path, headers, asked.body)


class Google:
    """The preconditions and the listing of Google's XML API, before a server of S3: a generation for each
    object, which `x-goog-if-generation-match` compares."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generations: dict[str, int] = {}
        self._last = 0

    def __call__(self, asked: Any) -> Any:
        path = urllib.parse.urlsplit(asked.path)
        headers = {name.lower(): value for name, value in asked.headers.items()}
        headers["authorization"] = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"
        wanted = headers.pop("x-goog-if-generation-match", None)
        is_whole = asked.method == "PUT" and "uploadId" not in path.query
        if not is_whole and asked.method != "DELETE" and "uploadId" not in path.query:
            with self._lock:
                generation = self._generations.get(path.path)
            status, found, data = forward(asked.port, asked.method, asked.path, headers, asked.body)
            return status, [*found, ("x-goog-generation", str(generation or 1))], data
        with self._lock:  # one write after the other
            if wanted is not None and int(wanted) != self._generations.get(path.path, 0):
                text = b"<Error><Code>PreconditionFailed</Code></Error>"
                return 412, [], text
            status, found, data = forward(asked.port, asked.method, asked.path, headers, asked.body)
            if status < 300 and asked.method == "DELETE":
                self._generations.pop(path.path, None)
            elif status < 300 and (is_whole or asked.method == "POST"):
                self._last += 1
                self._generations[path.path] = self._last
                found = [*found, ("x-goog-generation", str(self._last))]
            return status, found, data


def uploads(port: int) -> int:
    """Return how many uploads are under way in the bucket."""
    return len(re.findall(rb"<Upload>", request(port, "GET", f"/{BUCKET}?uploads")[1]))
