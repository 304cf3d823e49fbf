"""Types that msgspec converts to on several threads at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src/holdfast"
TWO_THREADS = """
from __future__ import annotations
import threading, time, msgspec
from holdfast._core.ready import ready

def slowly():
    begun.set()
    time.sleep(0.3)
    return int

class Inner(msgspec.Struct):
    x: slowly()

class Outer(msgspec.Struct):
    inner: Inner

def convert():
    found.append(msgspec.convert({"inner": {"x": 1}}, ready(Outer)).inner.x)

begun, found = threading.Event(), []
threads = [threading.Thread(target=convert) for _ in range(2)]
threads[0].start()
begun.wait()
threads[1].start()
for thread in threads:
    thread.join()
print(found)
"""


def test_two_threads_convert_to_one_type_for_the_first_time() -> None:
    """Without `ready` this program ends by SIGSEGV with msgspec 0.22, each time."""
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[1, 1]\n"), done.stderr


def test_every_type_is_made_ready() -> None:
    calls = re.compile(r"msgspec\.convert\(|\bDecoder\((?!\))|\.decode\([^\n]*type=")
    unready = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        if path.name != "ready.py"
        for line in path.read_text().splitlines()
        if calls.search(line) and "ready(" not in line
    ]
    assert unready == []
