"""The memory that asynchronous saves copy into."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest

from holdfast._core.background.arena import Arena

SIZE = 32 << 20


def faults_of_a_copy(arena: Arena, data: np.ndarray) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    arena.copy(0, data.ctypes.data, data.nbytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("nbytes", [1, 4096, 256 << 10, (16 << 20) + 5])
def test_a_copy_into_new_and_into_mapped_pages_is_what_was_copied(nbytes: int) -> None:
    arena, data = Arena(), np.random.default_rng(0).integers(0, 255, nbytes, "u1")
    arena.reserve(nbytes + 64)
    for _ in range(2):
        arena.copy(64, data.ctypes.data, nbytes)
        assert bytes(arena.view(64, nbytes)) == data.tobytes()
        assert arena.is_new or not any(arena.view(0, 64))
        arena.populate()
        data = data[::-1].copy()
    assert not arena.is_new


def test_an_arena_whose_making_is_interrupted_goes_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at every line in turn, as by Ctrl-C, or by a lack of memory."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    at, lines = 0, 1

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code is not Arena.__init__.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise MemoryError
        return look

    while at <= lines:  # it was interrupted
        at, lines = at + 1, 0
        sys.settrace(look)
        try:
            with suppress(MemoryError):
                Arena()
        finally:
            sys.settrace(None)
    gc.collect()
    assert at > 8
    assert not ignored


def test_a_copy_meets_no_page_faults_once_the_pages_are_there() -> None:
    if ctypes.CDLL(None).madvise(None, 0, 23):
        pytest.skip("this kernel can't populate pages")
    arena, data = Arena(), np.ones(SIZE, "u1")
    arena.reserve(SIZE)
    pages = SIZE // mmap.PAGESIZE
    assert faults_of_a_copy(arena, data) < pages / 10  # written to the file
    arena.populate()
    assert faults_of_a_copy(arena, data) < pages / 10
    arena.reserve(2 * SIZE)
    assert arena.is_new
