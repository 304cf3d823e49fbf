"""The reader of objects that torch saved: it builds what torch's own reader builds, and checks more."""

from __future__ import annotations

import argparse
import collections
import fractions
import functools
import io
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from holdfast._core.format import objects
from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's of quantized, sparse and nested tensors


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.note = 1  # type: ignore[attr-defined]
    return tensor


def adam() -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


SAVED: dict[str, Callable[[], Any]] = {
    "tensors": lambda: [
        torch.arange(5),
        torch.zeros(0),
        torch.tensor(1.5),
        torch.zeros(2, dtype=torch.complex64),
    ],
    "all dtypes": lambda: [
        torch.zeros(3).to(getattr(torch, name)) for name in ("bfloat16", "float8_e4m3fn", "uint16", "bool")
    ],
    "views of one storage": lambda: [base := torch.zeros(4, 4), base.t(), base[1:, 2], base.expand(2, 4, 4)],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
    "a state dict with its metadata": lambda: torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    ).state_dict(),
    "an optimizer's state": adam,
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "a meta tensor": lambda: torch.empty(3, device="meta"),
    "a tensor with an attribute": with_attribute,
    "storages": lambda: [torch.zeros(5).untyped_storage()],
    "random states": lambda: [torch.get_rng_state(), np.random.RandomState(1).get_state()],
    "arrays": lambda: [
        np.arange(5),
        np.zeros((2, 3), ">f4"),
        np.zeros((0, 2)),
        np.array(True),
        np.asfortranarray(np.ones((2, 2))),
    ],
    "scalars of NumPy": lambda: [np.float32(3), np.bool_(1), np.int64(-1)],
    "bytes": lambda: [b"", b"abc", bytearray(b"xyz"), torch.zeros(1)],
    "keys of all kinds": lambda: {
        (1, (2, "a")): torch.zeros(1),
        None: 1,
        1.5: 2,
        b"k": 3,
        torch.float32: 4,
        torch.Size([1]): 5,
        1 << 70: 6,
    },
    "many equal small keys": lambda: [{at: torch.zeros(1) for at in range(5)} for _ in range(300)],
    "namespaces in namespaces": lambda: argparse.Namespace(a=argparse.Namespace(b=[1, {2: torch.zeros(1)}])),
    "containers of collections": lambda: [collections.OrderedDict(b=1), collections.Counter("abca"), {1, 2}],
    "one part a hundred thousand times": lambda: argparse.Namespace(
        parts=[{"a": 1, "b": torch.Size([1])}] * 100_000
    ),
    "a list a thousand deep or so": lambda: functools.reduce(
        lambda inner, _: [inner], range(300), torch.zeros(1)
    ),
    "large numbers and odd text": lambda: [10**50, "\ud800", "\0", torch.zeros(1)],
    "a device and a layout": lambda: [torch.device("cpu"), torch.strided, torch.float16],
}


NUMPY = import_module("numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core")
MORE = [
    argparse.Namespace,
    bytes,
    np.ndarray,
    np.dtype,
    NUMPY.multiarray._reconstruct,
    NUMPY.multiarray.scalar,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"},
]
"""What objects may contain, and torch's own reader refuses unless it is allowed."""


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", SAVED)
def test_what_torch_loads_goes_through_a_checkpoint(name: str) -> None:
    value = [torch.zeros(1), SAVED[name]()]
    try:
        with torch.serialization.safe_globals(MORE):
            expected = torch.load(io.BytesIO(saved(value)), weights_only=True)
    except Exception:  # torch itself refuses it
        with pytest.raises(BadInput, match="can't be stored"):
            objects.encode(value, "it")
        return
    found = objects.decode(objects.encode(value, "it"), "it")
    assert repr(found) == repr(expected)


def test_what_a_load_would_refuse_is_told_at_the_save() -> None:
    """The same check runs when an object is encoded."""
    pairs: Any = ()
    for _ in range(40):
        pairs = (pairs, pairs)
    with pytest.raises(BadInput, match=r"'it' .*it says more than its length can pay for"):
        objects.encode([torch.zeros(1), argparse.Namespace(pairs=pairs)], "it")


def test_types_that_are_not_allowed_are_still_named() -> None:
    with pytest.raises(LoadFailed, match=r"allow-list: 'fractions\.Fraction'"):
        objects.decode(b"T" + saved([fractions.Fraction(1, 2)]), "it")


def test_bare_pickles_are_not_archives() -> None:
    with pytest.raises(CorruptCheckpoint, match="no zip archive"):
        objects.decode(b"T\x80\x02N.", "it")


def test_a_flipped_bit_in_a_tensor_is_damage() -> None:
    data = bytearray(saved(torch.arange(1000)))
    data[data.index(torch.arange(100, 200).numpy().tobytes())] ^= 1
    with pytest.raises(CorruptCheckpoint, match="is not what was written"):
        objects.decode(b"T" + data, "it")


def test_members_of_a_set_that_collide_are_charged_for() -> None:
    members = {at * ((1 << 61) - 1) for at in range(3000)}
    with pytest.raises(BadInput, match="more than its length can pay for"):
        objects.encode([torch.zeros(1), members], "it")
