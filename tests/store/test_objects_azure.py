"""Azure keeps the contract: against Azurite, of npm, if it is installed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import itertools
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast.testing import StoreContract
from tests.support.ports import HOST, held_port

pytest.importorskip("obstore")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        shutil.which("azurite-blob") is None, reason="there is no azurite-blob (npm: azurite)"
    ),
]
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its manual prints."""
_numbers = itertools.count(1)


def make_container(port: int) -> int:
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06"
    signed = "PUT" + "\n" * 12 + f"{headers}\n/{ACCOUNT}/{ACCOUNT}/box\nrestype:container"
    seal = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    about = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0"}
    about["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(seal).decode()}"
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("PUT", f"/{ACCOUNT}/box?restype=container", b"", about)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with held_port() as port:
        folder: Path = tmp_path_factory.mktemp("azurite")
        command = ["azurite-blob", "--blobHost", HOST, "--blobPort", str(port), "-l", str(folder)]
        server = subprocess.Popen(
            [*command, "--silent", "--skipApiVersionCheck"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            ends = time.monotonic() + 60
            while True:
                with suppress(OSError):
                    assert make_container(port) == 201
                    break
                assert time.monotonic() < ends, "Azurite did not start"
                time.sleep(0.1)
            yield port
        finally:
            server.kill()
            server.wait(30)


class TestAzure(StoreContract):
    @pytest.fixture
    def store(self, azurite: int, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://{HOST}:{azurite}/{ACCOUNT}")
        return open_store(f"az://box/contract-{next(_numbers)}")
