"""Thousands of seeded changes to real files of other formats and to real indexes: CorruptCheckpoint, or a
value, and nothing else."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast._core.format import objects, plain_objects, torch_dist
from holdfast._core.format.digest import digest
from holdfast._core.format.index_layout import encode
from holdfast._core.format.tensor_archive import Chunk, ChunkLocation, locate
from holdfast.errors import CorruptCheckpoint, HoldfastError, LoadFailed
from tests.format.indexes import build, everything
from tests.frameworks.torch_dcp.test_torch_dist import state

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of what it is given

OPCODES = [ord(opcode.code) for opcode in pickletools.opcodes]
NO_ARGUMENT = [bytes([code]) for code in b")]}N(\x88\x89\x85\x86\x87tRbaesu\x81Q"]


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to eight places changed: bits, operations, pieces left out, put in or copied, the end cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, kind = rng.randrange(max(len(out), 1)), rng.randrange(7)
        if not out:
            break
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice(OPCODES)
        elif kind == 2:
            out[at] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 3:
            out[at:at] = bytes([rng.choice(OPCODES)])
        elif kind == 4:
            start = rng.randrange(len(out))
            out[at:at] = out[start : start + rng.choice((2, 5, 20, 100))]
        elif kind == 5 or len(out) < 200:
            del out[at : at + rng.choice((1, 2, 5))]
        else:
            del out[at:]
    return bytes(out)


def changed_operations(data: bytes, rng: random.Random) -> bytes:
    """One to three operations of a pickle changed, so that most of what follows still means something."""
    starts = [at for _, _, at in pickletools.genops(data)]
    parts = [data[start:stop] for start, stop in zip(starts, [*starts[1:], len(data)], strict=True)]
    numbers = [b"K" + bytes([rng.choice((0, 1, 2, 5, 255))])]
    numbers += [b"J" + struct.pack("<i", value) for value in (-1, -(2**31), 2**31 - 1)]
    numbers += [b"\x8a\x08" + struct.pack("<q", value) for value in (-1, 2**62, 2**63 - 1, -(2**63))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(1, len(parts) - 1), rng.randrange(5)
        if kind <= 1 and parts[at][:1] in b"KMJ\x8a":
            parts[at] = rng.choice(numbers)
        elif kind == 2:
            parts[at] = rng.choice(NO_ARGUMENT)
        elif kind == 3:
            del parts[at]
        else:
            again = b"h" + bytes([rng.randrange(25)])
            parts.insert(
                at, rng.choice([rng.choice(parts), rng.choice(numbers), again, rng.choice(NO_ARGUMENT)])
            )
    return b"".join(parts)


def changed_numbers(data: bytes, rng: random.Random) -> bytes:
    """One to three numbers of a JSON text changed."""
    places = [found.span() for found in re.finditer(rb"\d+", data)]
    for start, stop in sorted(rng.sample(places, rng.choice((1, 1, 2, 3))), reverse=True):
        number = int(data[start:stop])
        other = rng.choice((0, 1, number + 1, number * 2, number + 8, 2**31, 2**63, 2**64, -1, -number))
        data = data[:start] + str(other).encode() + data[stop:]
    return data


Change = Callable[[bytes, random.Random], bytes]
CHANGES = pytest.mark.parametrize("change", [changed_bytes, changed_operations])


def count(
    calls: Iterator[Callable[[], Any]], allowed: tuple[type[HoldfastError], ...] = ()
) -> tuple[int, int]:
    """How many calls return, and how many raise what they may."""
    returned = refused = 0
    for call in calls:
        try:
            call()
            returned += 1
        except (CorruptCheckpoint, *allowed) as error:
            refused += 1
            words = error.message
            assert len(words) < 3000, words[:200]
    return returned, refused


@CHANGES
def test_metadata_of_dcp(change: Change, tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    root = pickle.loads((tmp_path / ".metadata").read_bytes())
    good = [pickle.dumps(root, protocol) for protocol in (2, 3, 4, 5)]
    rng = random.Random(f"metadata {change.__name__}")

    def read(data: bytes) -> None:
        found = torch_dist.read_metadata(data, "it")
        torch_dist.to_columns(
            found, [[ChunkLocation(0, 1, 0, False) for _ in entry.chunks] for entry in found]
        )

    returned, refused = count(partial(read, change(rng.choice(good), rng)) for _ in range(3000))
    assert returned > 100
    assert refused > 1000


def saved(value: Any) -> dict[str, bytes]:
    """The members of an archive of torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def changed_archive(members: dict[str, bytes], change: Change, rng: random.Random) -> bytes:
    """One member changed under a directory that is right, or the archive itself."""
    if rng.random() < 0.2:
        return changed_bytes(packed(members), rng)
    name = next(iter(members)) if rng.random() < 0.9 else rng.choice(list(members))
    use = change if name.endswith("data.pkl") else changed_bytes
    return packed(members | {name: use(members[name], rng)})


def part_of(data: bytes, at: int, length: int) -> bytes:
    return data[at : at + length]


@CHANGES
def test_archives_of_one_tensor(change: Change) -> None:
    values = (torch.randn(5, 7), torch.zeros(5, 7).bfloat16(), torch.nn.Parameter(torch.zeros(5, 7)))
    good = [saved(value) for value in values]
    rng = random.Random(f"tensors {change.__name__}")

    def read(data: bytes) -> None:
        chunk = Chunk((0, 0), (5, 7), "file", 0, len(data))
        member = locate(partial(part_of, data), chunk, "float32", 4, "w", "it")
        assert 0 <= member.position <= member.position + member.nbytes <= len(data)
        assert member.nbytes == 140

    # LoadFailed: strides changed to others within the storage, as of a transposed tensor, are no damage.
    returned, refused = count(
        (partial(read, changed_archive(rng.choice(good), change, rng)) for _ in range(2000)), (LoadFailed,)
    )
    assert returned > 20
    assert refused > 500


def test_a_transposed_tensor_that_ends_too_early_is_damage() -> None:
    members = saved(torch.arange(6.0).view(2, 3).t())
    (data,) = (name for name in members if "/data/" in name)
    for length, error in ((24, LoadFailed), (20, CorruptCheckpoint)):
        archive = packed(members | {data: members[data][:length]})
        chunk = Chunk((0, 0), (3, 2), "file", 0, len(archive))
        with pytest.raises(error):
            locate(partial(part_of, archive), chunk, "float32", 4, "w", "it")


@CHANGES
def test_objects(change: Change) -> None:
    values: list[Any] = [
        {"a": torch.arange(5), "n": [1, (2, 3)], "d": {1: 2, (1, 2): 3}},
        argparse.Namespace(x=1, y=[torch.zeros(3)]),
        collections.OrderedDict(a=1),
        collections.Counter("hello"),
        np.arange(7),
        [np.float64(3), torch.float32, torch.Size([1])],
        torch.nn.Linear(2, 2).state_dict(),
        {1, 2, 3},
    ]
    good = [saved(value) for value in values]
    rng = random.Random(f"objects {change.__name__}")
    decode = partial(objects.decode, name="it")
    returned, refused = count(
        (
            partial(decode, plain_objects.TORCH + changed_archive(rng.choice(good), change, rng))
            for _ in range(1000)
        ),
        (LoadFailed,),
    )
    assert returned > 20
    assert refused > 200


@pytest.mark.parametrize("change", [changed_bytes, changed_numbers])
def test_headers_of_indexes(change: Change) -> None:
    """Under digests that are right, so that what a header says is believed as far as it can be."""
    rows = [("model.a", 1, 0, (4, 3), 2), ("model.b", 2, 0, (7,), 1), ("step", 0, 1, (9,), 1)]
    good = encode(build(rows), {"step": 3, "notes": {"a": [1, 2.5, None]}})
    length = 8 + struct.unpack_from("<Q", good)[0]
    rng = random.Random(f"headers {change.__name__}")

    def sealed(text: bytes) -> bytes:
        header = struct.pack("<Q", len(text)) + text
        return header + good[length:-16] + struct.pack("<Q", digest(header)) + good[-8:]

    returned, refused = count(partial(everything, sealed(change(good[8:length], rng))) for _ in range(2000))
    assert returned > 0
    assert refused > 1000
