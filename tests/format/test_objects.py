"""Objects: what goes in comes out, and reading executes nothing."""

from __future__ import annotations

import argparse
import collections
import io
import json
import math
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.format import objects, plain_objects
from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed


def there_and_back(value: Any) -> Any:
    return objects.decode(objects.encode(value, "it"), "it")


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types, with NaN equal to itself and -0.0 unlike 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    return bool(a == b)


keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(max_size=4), st.floats(allow_nan=False)
)
scalars = st.one_of(keys, st.floats(), st.complex_numbers(), st.binary(max_size=8).map(bytearray))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["!", "v", "tuple"]), inner, max_size=3),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(values)
def test_plain_values_round_trip_without_torch(value: Any) -> None:
    data = objects.encode(value, "it")
    assert data[:1] == plain_objects.PLAIN
    assert same(objects.decode(data, "it"), value)
    json.loads(data[1:].decode("ascii"), parse_constant=pytest.fail)  # JSON that any program reads


def test_equal_values_have_equal_bytes() -> None:
    assert objects.encode({3, 1, 2}, "") == objects.encode({1, 2, 3}, "")
    assert objects.encode((1, 2), "") != objects.encode([1, 2], "")
    assert objects.encode({1: 2}, "") != objects.encode({"1": 2}, "")
    assert objects.encode(True, "") != objects.encode(1, "")
    assert objects.encode(1.0, "") != objects.encode(1, "")


def test_random_state_of_python_comes_back() -> None:
    state = random.getstate()
    expected = random.Random()
    expected.setstate(state)
    found = there_and_back(state)
    assert found == state
    other = random.Random()
    other.setstate(found)
    assert other.random() == expected.random()


def test_random_state_of_numpy_and_torch_come_back() -> None:
    state = np.random.RandomState(5).get_state()
    found = there_and_back(state)
    assert found[0] == state[0]
    assert (found[1] == state[1]).all()
    again = np.random.RandomState()
    again.set_state(found)
    assert again.rand() == np.random.RandomState(5).rand()
    generator = np.random.default_rng(3)
    modern = np.random.default_rng()
    modern.bit_generator.state = there_and_back(generator.bit_generator.state)
    assert modern.random() == generator.random()
    rng = torch.get_rng_state()
    assert torch.equal(there_and_back({"cpu": rng, "cuda": None})["cpu"], rng)


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=1e-4, names=["a"], nested=argparse.Namespace(x=None)),
        collections.OrderedDict(b=1, a=2),
        collections.Counter("hello"),
        np.float64(1.5),
        np.int64(-3),
        np.bool_(True),
        torch.float32,
        torch.Size([2, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_allowed_values_round_trip(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_an_attribute_of_a_namespace_may_have_any_name() -> None:
    value = argparse.Namespace(lr=1)
    vars(value).update({"self": 3, "not a name": 4, "__class__": 5})
    found = there_and_back(value)
    assert type(found) is argparse.Namespace
    assert vars(found) == vars(value)


@pytest.mark.parametrize(
    "code", ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_numpy_arrays_round_trip(code: str, shape: tuple[int, ...]) -> None:
    if code == "<f2":
        value = np.ones(shape, "<f4").astype(code)
    else:
        value = np.ones(shape, code)
    found = there_and_back({"a": value})["a"]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert (found == value).all()


class Thing:
    """A user's class."""

    def __init__(self) -> None:
        self.x = 1


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 1, "function"),
        (Thing(), "Thing"),
        ([Thing()], "list"),
        ({"a": (1, nothing)}, "dict"),
        (os.system, "builtin"),
        (Thing, "type"),
    ],
    ids=["lambda", "instance", "in a list", "function", "os.system", "class"],
)
def test_what_loading_would_have_to_execute_is_refused_at_save(value: Any, words: str) -> None:
    with pytest.raises(BadInput, match="executes nothing") as caught:
        objects.encode(value, "model.it")
    assert "'model.it'" in str(caught.value)
    assert words in str(caught.value)
    assert "state_dict" in caught.value.hint


def test_an_array_of_objects_is_refused_at_save_and_what_to_store_is_said() -> None:
    with pytest.raises(
        BadInput, match=r"'model.it' has a NumPy array of object in it.* executes nothing"
    ) as caught:
        objects.encode({"a": [np.asarray([Thing()], dtype=object)]}, "model.it")
    assert "tolist" in caught.value.hint


@pytest.fixture(autouse=True)
def no_types_of_others() -> Iterator[None]:
    """Importing megatron-core allows types of its own, for the whole process."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


class Touch:
    """A payload: unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def hostile_pickles(path: Path) -> dict[str, bytes]:
    found = {"plain": pickle.dumps(Touch(path), 2), "new": pickle.dumps(Touch(path), 4)}
    for name, legacy in (("zip", True), ("old", False)):
        buffer = io.BytesIO()
        torch.save({"a": Touch(path)}, buffer, _use_new_zipfile_serialization=legacy)
        found[name] = buffer.getvalue()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'touch " + str(path).encode() + b"'\ntR.")
        archive.writestr("archive/version", b"3\n")
    found["hand"] = buffer.getvalue()
    code = f"open({str(path)!r}, 'w').close()"
    found["eval"] = b"c__builtin__\neval\n(V" + code.encode() + b"\ntR."
    return found


@pytest.mark.parametrize("kind", ["plain", "new", "zip", "old", "hand", "eval"])
def test_a_hostile_pickle_does_not_execute(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    payload = hostile_pickles(mark)[kind]
    if kind in ("plain", "new", "eval"):
        with pytest.MonkeyPatch.context() as patch:  # the payload is a real one
            patch.setattr(os, "system", lambda command: mark.touch())
            pickle.loads(payload)
        assert mark.exists() or kind != "eval"
        mark.unlink(missing_ok=True)
    with pytest.raises((CorruptCheckpoint, LoadFailed), match=r"'it' was not loaded"):
        objects.decode(plain_objects.TORCH + payload, "it")
    assert not mark.exists()


def test_a_type_that_only_the_saver_allowed_is_named_and_is_no_damage() -> None:
    with torch.serialization.safe_globals([Thing]):
        data = objects.encode(Thing(), "it")
        assert isinstance(objects.decode(data, "it"), Thing)
    with pytest.raises(LoadFailed, match=r"'it' .* allow-list: '.*Thing'") as caught:
        objects.decode(data, "it")
    assert "add_safe_globals" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"X123",
        b"J",
        b"J{",
        b"J\xff\xfe",
        b'J{"!":"eval","v":"1"}',
        b'J{"!":["tuple"],"v":[]}',
        b'J{"!":"tuple"}',
        b'J{"!":"complex","v":[]}',
        b'J{"!":"complex","v":["a","b"]}',
        b'J{"!":"set","v":[[1]]}',
        b'J{"!":"dict","v":[[1]]}',
        b'J{"!":"dict","v":3}',
        b'J{"!":"bytes","v":"zz"}',
        b'J{"!":"float","v":"x"}',
        b"J" + b"[" * 100_000,
        b"T",
        b"Tgarbage",
        b"T\x80\x02.",
    ],
)
def test_damaged_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="'it'"):
        objects.decode(data, "it")
    assert plain_objects.preview(data)


def test_every_truncation_of_a_torch_object_is_corrupt() -> None:
    data = objects.encode({"a": torch.arange(3), "b": argparse.Namespace(x=1)}, "it")
    for length in range(0, len(data), 37):
        with pytest.raises(CorruptCheckpoint):
            objects.decode(data[:length], "it")


def test_preview_is_one_short_line() -> None:
    assert plain_objects.preview(objects.encode({"step": 3}, "")) == "{'step': 3}"
    assert len(plain_objects.preview(objects.encode(list(range(1000)), ""))) == 60
    assert "weights-only" in plain_objects.preview(objects.encode(torch.zeros(2), ""))
    assert plain_objects.preview(b"J{") == "<damaged>"


def test_preview_of_a_set_is_the_same_in_each_process() -> None:
    """Ranks compare it. A set of texts has another order in each process."""
    value = {frozenset(), frozenset("abc"), *"xyz"}
    code = (
        "from holdfast._core.format.plain_objects import PLAIN, preview, to_json; import json; "
        f"print(preview(PLAIN + json.dumps(to_json({value!r})).encode(), 99))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert said == {"{'x', 'y', 'z', frozenset({'a', 'b', 'c'}), frozenset()}\n"}
