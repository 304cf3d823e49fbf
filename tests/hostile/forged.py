"""Files that ask for far more memory or time than they have bytes, and a child process that reads them with
little of both."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast._core.format import objects, plain_objects
from holdfast._core.format.columns import Columns
from holdfast.errors import HoldfastError
from tests.hostile.checkpoint import forge

HEADROOM = 768 << 20
"""Bytes of address space that a child may add to what it has after its imports."""
SECONDS = 240
"""After which a child that has not come back is ended; it takes eight, most of them for its imports."""


# -- pickles -----------------------------------------------------------------------------------


def shared_pairs(depth: int = 40) -> bytes:
    """`t = (t, t)`, over and over, on the stack: 6 bytes a level, 2 ** depth leaves."""
    levels = b"".join(b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86" for level in range(depth))
    return b")\x85" + levels


def nested(depth: int) -> bytes:
    """`t = (t,)`, over and over: 6 bytes a level."""
    return b")" + b"\x85r\0\0\0\0" * depth


def shared_metadata() -> bytes:
    """Real metadata in which 20,000 tensors share one list of 20,000 chunks: 400 million to look at."""
    found = dcp.metadata
    chunk = found.ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    properties = found.TensorProperties(dtype=torch.float32)
    tensor = found.TensorStorageMetadata(properties, torch.Size([0]), [chunk] * 20_000)
    return pickle.dumps(found.Metadata({str(at): tensor for at in range(20_000)}, storage_data={}))


def stored_at_pairs() -> bytes:
    """Real metadata in which a tensor's file has nested pairs for a name."""
    found = dcp.metadata
    pairs: Any = ()
    for _ in range(40):
        pairs = (pairs, pairs)
    size = torch.Size([1])
    chunks = [found.ChunkStorageMetadata(torch.Size([0]), size)]
    tensor = found.TensorStorageMetadata(found.TensorProperties(dtype=torch.float32), size, chunks)
    info = dcp.filesystem._StorageInfo(pairs, 0, 1)  # type: ignore[arg-type]
    key = found.MetadataIndex("w", torch.Size([0]))
    return pickle.dumps(found.Metadata({"w": tensor}, storage_data={key: info}))


COLLIDING = b"\x80\x02}(" + b"".join(
    b"\x8a\x0b" + (at * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for at in range(100_000)
) + b"u."  # fmt: skip
"""A dict of a hundred thousand numbers that all have the hash 0."""

PICKLES: dict[str, tuple[bytes, str]] = {
    "a memo index of a thousand million": (
        b"\x80\x02Nr\xff\xff\xff\x3f.",
        "it keeps entry 1073741823 of its memo, which has 0",
    ),
    "a key of nested pairs": (b"\x80\x02}" + shared_pairs() + b"Ns.", "a key in it is a tuple"),
    "a key nested a million deep": (b"\x80\x02}" + nested(1_000_000) + b"Ns.", "a key in it is a tuple"),
    "a shape of nested pairs": (
        b"\x80\x02ctorch\nSize\n" + shared_pairs() + b"\x85R.",
        "a part of it is of another kind",
    ),
    "a path of nested pairs": (
        b"\x80\x02cpathlib\nPosixPath\n" + shared_pairs() + b"\x85R.",
        "it describes no tensors",
    ),
    "four million empty dicts": (
        b"\x80\x02(" + b"}" * 4_000_000 + b"t.",
        "more containers than its length",
    ),
    "four million sets": (b"\x80\x04(" + b"\x8f" * 4_000_000 + b"t.", "more containers than its length"),
    "two million marks": (b"\x80\x02" + b"(" * 2_000_000 + b".", "it is nested more than 1000 deep"),
    "keys that collide": (COLLIDING, "a key in it is a int, or a large number"),
    "text that is longer than the file": (b"\x80\x02X\xff\xff\xff\x7fabc.", "it ends too early"),
    "bytes that are longer than the file": (b"\x80\x04B\xff\xff\xff\x7fabc.", "it ends too early"),
    "a tensor's file named by nested pairs": (stored_at_pairs(), "it stores 'w' in what is no file"),
}


# -- archives ------------------------------------------------------------------------------------


def archive(value: Any, kind: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    """What torch.save makes of a value, packed again, with other members."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(packed, "w", kind) as target:
        for name in source.namelist():
            target.writestr(name, changed.pop(name.partition("/")[2], source.read(name)))
    return packed.getvalue()


def of_pickle(data: bytes, value: Any = None) -> bytes:
    """An archive whose `data.pkl` says something else."""
    return archive(value, **{"data.pkl": data})


@cache
def bomb() -> bytes:
    """A tensor of a GiB of zeros in a few MB."""
    members, packed = zipfile.ZipFile(io.BytesIO(archive(torch.zeros(3)))), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target:
        for name in members.namelist():
            if not name.endswith("data/0"):
                target.writestr(name, members.read(name))
        with target.open("archive/data/0", "w") as member:
            for _ in range(64):
                member.write(bytes(16 << 20))
    return packed.getvalue()


def overlapping(data: bytes, count: int = 2000) -> bytes:
    """An archive that lists one member many times."""
    end = data[-22:]
    size, begin = struct.unpack_from("<II", end, 12)
    listing = data[begin : begin + size]
    one = listing[: 46 + sum(struct.unpack_from("<HHH", listing, 28))]
    many = b"".join(one.replace(b"data.pkl", b"data%04d" % at) for at in range(count)) + listing
    counted = struct.unpack_from("<H", end, 10)[0] + count
    ending = end[:8] + struct.pack("<HHII", counted, counted, len(many), begin) + b"\0\0"
    return data[:begin] + many + ending


def short_storage() -> bytes:
    """A tensor of a hundred million floats in a storage of 12 bytes."""
    pickled = zipfile.ZipFile(io.BytesIO(archive(torch.zeros(3)))).read("archive/data.pkl")
    return of_pickle(pickled.replace(b"K\x03t", b"J" + struct.pack("<i", 100_000_000) + b"t"), torch.zeros(3))


def dtype_state() -> bytes:
    """A number's type with a state that ends a process in which NumPy takes it."""
    value = [np.float64(3)]
    pickled = zipfile.ZipFile(io.BytesIO(archive(value))).read("archive/data.pkl")
    return of_pickle(pickled.replace(b"NNNJ", b"NJ", 1))


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\n"
COPIES = (
    b"\x80\x02](c_codecs\nencode\nq\x00X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
    + b"q\x01X\x06\0\0\0latin1q\x02\x86R" + b"h\x00h\x01h\x02\x86R" * 1000 + b"e."
)  # fmt: skip
"""A megabyte of text, encoded a thousand times."""
TOO_MUCH = "it says more than its length can pay for"
OBJECTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a zip bomb": (bomb, "is compressed"),
    "one member listed two thousand times": (
        lambda: overlapping(archive([torch.zeros(3)])),
        "its directory lists members that can't all be there",
    ),
    "a storage that is shorter than its tensor": (short_storage, "its storage '0' has 12 bytes"),
    "a dtype that is not one": (
        dtype_state,
        "__setstate__ with arguments that are not its own (no dtype of numbers has this state)",
    ),
    "a key of nested pairs in an object": (
        lambda: of_pickle(b"\x80\x02}" + shared_pairs() + b"Ns."),
        TOO_MUCH,
    ),
    "a key nested a million deep in an object": (
        lambda: of_pickle(b"\x80\x02}" + nested(1_000_000) + b"Ns."),
        "it is nested more than 1000 deep",
    ),
    "a call of nested pairs": (
        lambda: of_pickle(b"\x80\x02" + shared_pairs() + b")R."),
        "it calls what is no name",
    ),
    "a storage named by nested pairs": (
        lambda: of_pickle(b"\x80\x02" + STORAGE + shared_pairs() + b"X\x03\0\0\0cpuK\x01tQ."),
        "it refers to a storage by what is none",
    ),
    "keys that collide in an object": (lambda: of_pickle(COLLIDING), TOO_MUCH),
    "a thousand copies of a megabyte": (lambda: of_pickle(COPIES), TOO_MUCH),
    "a buffer by its length alone": (
        lambda: of_pickle(b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x10\x85R."),
        "arguments that are not its own",
    ),
}


# -- checkpoints ---------------------------------------------------------------------------------


def with_metadata(folder: Path, data: bytes | None = None, size: int | None = None) -> Path:
    """A folder with this `.metadata`, or a sparse one of that size."""
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(data or b"\x80\x04")
    if size is not None:
        os.truncate(folder / ".metadata", size)
    return folder


def with_object(folder: Path, data: bytes) -> Path:
    """A Holdfast checkpoint that holds these bytes as an object of torch.save."""
    original = objects.encode
    objects.encode = lambda value, name: plain_objects.TORCH + data
    try:
        holdfast.save({"w": [1]}, folder, job=holdfast.Job(no_dist=True))
    finally:
        objects.encode = original
    return folder


def with_dcp_object(folder: Path, data: bytes) -> Path:
    """The same in a checkpoint of torch DCP."""
    dcp.save({"w": {1, 2}}, checkpoint_id=folder, no_dist=True)
    root = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = root.storage_data.values()
    info.offset, info.length = 0, len(data)
    (folder / ".metadata").write_bytes(pickle.dumps(root))
    (folder / info.relative_path).write_bytes(data)
    return folder


def with_index_header(folder: Path, length: int) -> Path:
    """An index that is a header of that length and nothing else, most of it a hole."""
    folder.mkdir(parents=True)
    with open(folder / "index.safetensors", "wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(length + 1000)
    return folder


def with_large_object(folder: Path, size: int) -> Path:
    """A Holdfast checkpoint of an object of that size, most of it a hole."""
    holdfast.save({"w": [1]}, folder, job=holdfast.Job(no_dist=True))
    (data,) = (folder / "data").iterdir()

    def enlarge(columns: Columns) -> None:
        columns.shape[0, -1] = columns.size[0, -1] = columns.block[0] = size
        columns.file_size[0] = columns.position[0] + size
        os.truncate(data, int(columns.file_size[0]))

    forge(folder, enlarge)
    return folder


# -- the child -----------------------------------------------------------------------------------


def outcomes(places: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """How a load of each folder ends, in one process with little memory: the error's type and words."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.forged"],
        input=json.dumps({name: str(place) for name, place in places.items()}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ended = (
        ""
        if done.returncode == 0
        else f"the child ended with {done.returncode} after these: {done.stderr[-2000:]}"
    )
    assert not ended, (ended, [name for name, *_ in found])
    return {name: (kind, words) for name, kind, words in found}


def _child(places: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, used + HEADROOM))
    gc.freeze()  # or each collection would go through all that torch has imported
    for name, place in places.items():
        try:
            if name.startswith("restore"):
                state = {"w": [0]}
                yield name, "restored", str(holdfast.Checkpoints(place, asynchronous=False).restore(state))
            else:
                holdfast.load({"w": None}, place, job=holdfast.Job(no_dist=True, timeout=100))
                yield name, "loaded", ""
        except HoldfastError as error:
            yield name, type(error).__name__, error.message
        except BaseException as error:
            yield name, f"raw {type(error).__name__}", str(error)[:1000]
        gc.collect()


if __name__ == "__main__":
    for line in _child(json.load(sys.stdin)):
        print(json.dumps(line), flush=True)
