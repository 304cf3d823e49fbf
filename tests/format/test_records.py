"""Values of Python's own classes and records of a user's: what goes in comes out, and nothing of a class is called."""

from __future__ import annotations

import enum
import io
import json
from collections import deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.format import objects, plain_objects
from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed

CALLED: list[str] = []


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 0


class Bits(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: int
    right: Any


Old = namedtuple("Old", "a b")


@dataclass
class Config:
    name: str
    colors: list[Color] = field(default_factory=list)
    pair: Pair | None = None

    def __post_init__(self) -> None:
        CALLED.append("post_init")

    def __setattr__(self, key: str, value: object) -> None:
        CALLED.append("setattr")
        super().__setattr__(key, value)


@dataclass(frozen=True, slots=True)
class Small:
    x: int


@dataclass
class Changing:
    """Says itself how it is stored."""

    x: int

    def __getstate__(self) -> dict[str, int]:
        return {"x": 0}


def plain(value: object) -> bytes:
    data = objects.encode(value, "it")
    assert data[:1] == plain_objects.PLAIN
    json.loads(data[1:])
    return data


STDLIB = st.one_of(
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=-3, seconds=7), "X")])),
    st.timedeltas(),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.lists(st.integers(), max_size=3).map(lambda items: deque(items, maxlen=5)),
    st.text("ab/.", min_size=1).map(PurePosixPath),
    st.sampled_from([Path("/a/b"), PureWindowsPath("C:\\x"), time(1, fold=1), datetime(2020, 1, 1, fold=1)]),
)


@given(STDLIB)
def test_values_of_pythons_own_classes_come_back(value: Any) -> None:
    found = objects.decode(plain({"in": [value]}), "it")["in"][0]  # type: ignore[index]
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


def test_a_buffer_comes_back_with_its_position() -> None:
    buffer = io.BytesIO(b"abc")
    buffer.seek(2)
    found: Any = objects.decode(plain(buffer), "it")
    assert (found.getvalue(), found.tell()) == (b"abc", 2)
    assert plain_objects.preview(plain(buffer)) == "BytesIO(content=b'abc', position=2)"
    other = io.BytesIO(b"abc")
    assert plain_objects.canonical(plain(other)) != plain_objects.canonical(plain(buffer))
    other.seek(2)
    assert plain_objects.canonical(plain(other)) == plain_objects.canonical(plain(buffer))


RECORDS = [Color.BLUE, Level.LOW, Bits.B, Pair(1, [2]), Old((1,), {"x": 2}), Small(3)]


@pytest.mark.parametrize("value", RECORDS, ids=lambda value: type(value).__name__)
def test_records_come_back_if_the_state_has_their_class(value: Any) -> None:
    data = plain([{"a": (value, {Color.RED: 1})}])
    like = [{"a": (type(value).__members__["LOW"] if value is Level.LOW else value, Color.RED)}]
    found: Any = objects.decode(data, "it", like)
    assert found == [{"a": (value, {Color.RED: 1})}]
    assert type(found[0]["a"][0]) is type(value)
    with pytest.raises(
        LoadFailed, match=r"neither the state .* nor this process allows: tests\.format\.test_records"
    ):
        objects.decode(data, "it")
    assert type(value).__name__ in plain_objects.preview(data, 999)


def test_nothing_of_a_class_is_called() -> None:
    value = Config("a", [Color.RED], Pair(1, Small(2)))
    data = plain(value)
    like = Config("b", [Color.BLUE], Pair(0, Small(0)))
    CALLED.clear()
    assert objects.decode(data, "it", like) == value
    assert not CALLED
    assert (
        plain_objects.preview(data, 999)
        == "Config(name='a', colors=[Color.RED], pair=Pair(left=1, right=Small(x=2)))"
    )


def test_a_class_that_the_process_allows_needs_no_value() -> None:
    data = plain(Small(3))
    with torch.serialization.safe_globals([Small]):
        assert objects.decode(data, "it") == Small(3)


@pytest.mark.parametrize(
    "value", [Bits.A | Bits.B, Changing(1), datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC"))]
)
def test_what_is_more_than_its_parts_is_refused_at_save(value: Any) -> None:
    with pytest.raises(BadInput, match="executes nothing"):
        objects.encode(value, "it")


@pytest.mark.parametrize(
    ("text", "like", "error", "words"),
    [
        ('{"!":"enum","of":"X","v":[["GREEN",null]]}', Color.RED, LoadFailed, "no member 'GREEN'"),
        ('{"!":"dataclass","of":"X","v":[["y",1]]}', Small(1), LoadFailed, "has the fields x, and not y"),
        ('{"!":"dataclass","of":"X","v":[]}', Small(1), LoadFailed, "has the fields x"),
        ('{"!":"namedtuple","of":"X","v":[["left",1]]}', Pair(1, 2), LoadFailed, "has not the fields left"),
        ('{"!":"enum","of":"X","v":[["x",1]]}', Small(1), LoadFailed, "is no enum here"),
        ('{"!":"enum","of":"X","v":[]}', Color.RED, CorruptCheckpoint, "can't be decoded"),
        ('{"!":"dataclass","of":"os.system","v":[]}', Small(1), LoadFailed, r"nor this process allows: os\.system"),
        ('{"!":"Fraction","v":["1e999999999",1]}', None, CorruptCheckpoint, "no whole number"),
        ('{"!":"deque","v":[3,null]}', None, CorruptCheckpoint, "can't be decoded"),
        ('{"!":"BytesIO","v":[7,0]}', None, CorruptCheckpoint, "can't be decoded"),
        ('{"!":"datetime","v":[2020,13,1,0,0,0,0,null,0]}', None, CorruptCheckpoint, "month"),
        ('{"!":"Decimal","v":["x"]}', None, CorruptCheckpoint, "can't be decoded"),
        ('{"!":"PosixPath","v":[3]}', None, CorruptCheckpoint, "can't be decoded"),
    ],
)  # fmt: skip
def test_forged_and_changed_records_are_refused(
    text: str, like: Any, error: type[Exception], words: str
) -> None:
    name = f"{type(like).__module__}.{type(like).__qualname__}"
    data = plain_objects.PLAIN + text.replace('"X"', f'"{name}"').encode()
    with pytest.raises(error, match=words):
        objects.decode(data, "it", like)


def test_a_field_that_came_later_has_its_default() -> None:
    @dataclass
    class Now:
        x: int
        y: int = 7

    path = f"{Now.__module__}.{Now.__qualname__}"
    data = plain_objects.PLAIN + json.dumps({"!": "dataclass", "of": path, "v": [["x", 1]]}).encode()
    assert objects.decode(data, "it", Now(0)) == Now(1, 7)
