"""What every store must do: subclass it, give it a store, and run it with pytest.

    from holdfast.testing import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)          # an empty one, for each test

The protocol of a save rests on these promises (see `holdfast.store.base`).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest

from holdfast.errors import BadInput, Conflict, StorageError
from holdfast.store.base import TAIL, NotFound, Store

HOSTILE_PATHS = (
    "", "/", ".", "..", "../a", "a/../b", "a/..", "/etc/passwd", "a//b", "a/", "./a", "a/./b", "a\0b", "../../a/b",
)  # fmt: skip


def race(actions: list[Callable[[], object]]) -> list[object]:
    """Run them at once, each on its thread; what each returned or raised."""
    gate = threading.Barrier(len(actions))
    found: list[object] = [None] * len(actions)

    def run(at: int) -> None:
        gate.wait(30)
        try:
            found[at] = actions[at]()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def put(store: Store, path: str, data: bytes) -> None:
    """A finished file."""
    writer = store.create(path)
    writer.write_at(0, [data])
    writer.finish()


def content(store: Store, path: str) -> bytes:
    """All of a file."""
    reader = store.open(path)
    try:
        return reader.read(0, reader.size)
    finally:
        reader.close()


class StoreContract:
    """Override `store`; everything else is inherited."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("Give the contract a store: override this fixture.")

    # -- files --------------------------------------------------------------------------------

    def test_what_was_finished_is_read_back(self, store: Store) -> None:
        writer = store.create("data/a.bin")
        writer.write_at(0, [b"abc", bytearray(b"de"), memoryview(b"fgh")])
        writer.write_at(8, [b"ij"])
        writer.finish()
        reader = store.open("data/a.bin")
        assert reader.size == 10
        assert bytes(reader.read(0, 10)) == b"abcdefghij"
        reader.close()

    def test_writes_may_come_in_any_order_and_from_several_threads(self, store: Store) -> None:
        parts = [bytes([at]) * 1000 for at in range(16)]
        writer = store.create("a")
        order = [*range(1, 16, 2), *range(0, 16, 2)]

        def write(at: int) -> Callable[[], object]:
            return lambda: writer.write_at(at * 1000, [parts[at][:300], parts[at][300:]])

        assert race([write(at) for at in order]) == [None] * 16
        writer.finish()
        assert content(store, "a") == b"".join(parts)

    def test_many_buffers_at_once(self, store: Store) -> None:
        buffers = [bytes([at % 256]) * (at % 7) for at in range(3000)]  # more than one system call takes
        writer = store.create("a")
        writer.write_at(0, [b"head"])
        writer.write_at(4, buffers)
        writer.finish()
        whole = b"head" + b"".join(buffers)
        assert content(store, "a") == whole
        reader = store.open("a")
        targets = [bytearray(len(buffer)) for buffer in buffers]
        assert reader.read_into(4, targets) == len(whole) - 4
        assert b"".join(targets) == whole[4:]
        reader.close()

    def test_an_empty_file(self, store: Store) -> None:
        store.create("a").finish()
        reader = store.open("a")
        assert reader.size == 0
        assert bytes(reader.read(0, 10)) == b""
        assert reader.read_into(0, [bytearray(3)]) == 0
        reader.close()

    def test_ranges_are_cut_at_the_end_of_the_file(self, store: Store) -> None:
        put(store, "a", bytes(range(100)))
        reader = store.open("a")
        assert bytes(reader.read(10, 5)) == bytes(range(10, 15))
        assert bytes(reader.read(95, 50)) == bytes(range(95, 100))
        assert bytes(reader.read(200, 5)) == b""
        assert bytes(reader.read(3, 0)) == b""
        buffers = [bytearray(4), bytearray(0), bytearray(b"zzzzzz")]
        assert reader.read_into(94, buffers) == 6
        assert buffers[0] == bytes(range(94, 98))
        assert buffers[2] == bytes([98, 99]) + b"zzzz"
        assert reader.read_into(0, []) == 0
        reader.close()
        reader.close()  # twice is once

    def test_several_threads_read_one_file(self, store: Store) -> None:
        data = bytes(range(256)) * 40
        put(store, "a", data)
        reader = store.open("a")

        def some(at: int) -> Callable[[], object]:
            return lambda: bytes(reader.read(at * 100, 100)) == data[at * 100 : at * 100 + 100]

        assert race([some(at) for at in range(20)]) == [True] * 20
        reader.close()

    def test_create_is_exclusive(self, store: Store) -> None:
        put(store, "d/a", b"first")
        with pytest.raises(StorageError) as caught:
            store.create("d/a")
        assert caught.value.errno == errno.EEXIST
        assert content(store, "d/a") == b"first"

    def test_of_several_that_create_one_wins(self, store: Store) -> None:
        found = race([lambda: store.create("a") for _ in range(8)])
        winners = [one for one in found if not isinstance(one, Exception)]
        assert len(winners) == 1
        assert all(isinstance(one, StorageError) for one in found if one is not winners[0])

    def test_discard_leaves_nothing_and_never_raises(self, store: Store) -> None:
        writer = store.create("data/a")
        writer.write_at(0, [b"abc"])
        writer.discard()
        writer.discard()
        assert store.list("data") == []
        with pytest.raises(NotFound):
            store.open("data/a")
        put(store, "data/a", b"again")
        assert content(store, "data/a") == b"again"

    def test_what_is_missing_is_not_found(self, store: Store) -> None:
        for path in ("a", "no/such/folder/a"):
            with pytest.raises(NotFound, match="a failed") as caught:
                store.open(path)
            assert caught.value.errno == errno.ENOENT
            assert isinstance(caught.value, OSError)

    # -- publish ------------------------------------------------------------------------------

    def test_publish_is_exclusive(self, store: Store) -> None:
        first, second = b"1" * 100, b"2" * 100
        store.publish("d/index", first, None)
        with pytest.raises(Conflict, match="another save"):
            store.publish("d/index", second, None)
        assert content(store, "d/index") == first
        assert store.list("d") == ["index"]

    def test_publish_replaces_just_the_version_it_was_told(self, store: Store) -> None:
        first, second, third = (digit * 100 for digit in (b"1", b"2", b"3"))
        with pytest.raises(Conflict):
            store.publish("index", second, first[-TAIL:])
        store.publish("index", first, None)
        with pytest.raises(Conflict):
            store.publish("index", second, b"9" * TAIL)
        assert content(store, "index") == first
        store.publish("index", second, first[-TAIL:])
        with pytest.raises(Conflict):
            store.publish("index", third, first[-TAIL:])
        assert content(store, "index") == second
        assert store.list() == ["index"]

    def test_a_reader_keeps_the_version_that_it_opened(self, store: Store) -> None:
        first, second = b"1" * 100, b"2" * 50
        store.publish("index", first, None)
        reader = store.open("index")
        store.publish("index", second, first[-TAIL:])
        assert bytes(reader.read(0, reader.size)) == first
        reader.close()

    @pytest.mark.parametrize("attempt", range(5))
    def test_of_several_that_publish_one_wins(self, store: Store, attempt: int) -> None:
        versions = [bytes([at]) * 40 for at in range(8)]

        def publish(at: int) -> Callable[[], object]:
            return lambda: store.publish("index", versions[at], None)

        found = race([publish(at) for at in range(8)])
        self._one_won(store, found, versions)

    @pytest.mark.parametrize("attempt", range(5))
    def test_of_several_that_replace_one_version_one_wins(self, store: Store, attempt: int) -> None:
        old = b"old" * 40
        store.publish("index", old, None)
        versions = [bytes([at]) * 40 for at in range(8)]

        def publish(at: int) -> Callable[[], object]:
            return lambda: store.publish("index", versions[at], old[-TAIL:])

        found = race([publish(at) for at in range(8)])
        self._one_won(store, found, versions)

    @staticmethod
    def _one_won(store: Store, found: list[object], versions: list[bytes]) -> None:
        won = [at for at, one in enumerate(found) if one is None]
        assert len(won) == 1, found
        assert all(isinstance(one, Conflict) for at, one in enumerate(found) if at not in won), found
        assert content(store, "index") == versions[won[0]]
        assert store.list() == ["index"]

    def test_a_chain_of_replacements_loses_none(self, store: Store) -> None:
        """Many that each replace what they saw: exactly the successes count up."""
        store.publish("count", b"%016d" % 0, None)

        def add() -> object:
            done = 0
            for _ in range(10):
                now = content(store, "count")
                try:
                    store.publish("count", b"%016d" % (int(now) + 1), now[-TAIL:])
                    done += 1
                except Conflict:
                    continue
            return done

        done = race([add] * 4)
        assert int(content(store, "count")) == sum(int(str(one)) for one in done)

    # -- folders ------------------------------------------------------------------------------

    def test_list_shows_what_is_right_inside(self, store: Store) -> None:
        assert store.list() == []
        assert store.list("nowhere") == []
        for path in ("b", "a/x", "a/y", "a/c/z"):
            put(store, path, b"1")
        assert store.list() == ["a/", "b"]
        assert store.list("a") == ["c/", "x", "y"]
        assert store.list("a/c") == ["z"]
        assert store.list("b") == []

    def test_delete_takes_files_and_empty_folders(self, store: Store) -> None:
        put(store, "a/x", b"1")
        store.delete("a/x")
        store.delete("a/x")
        assert store.list("a") == []
        store.delete("a")
        store.delete("a")
        store.delete("never/was")
        assert store.list() == []
        with pytest.raises(NotFound):
            store.open("a/x")

    def test_a_child_is_a_folder_of_its_parent(self, store: Store) -> None:
        child = store.child("run/step-1")
        assert child.list() == []
        put(child, "data/a", b"1")
        assert content(store, "run/step-1/data/a") == b"1"
        assert store.list("run/step-1") == ["data/"]
        assert store.child("run").child("step-1").list("data") == ["a"]
        child.publish("index", b"2" * 20, None)
        with pytest.raises(Conflict):
            store.publish("run/step-1/index", b"3" * 20, None)
        assert child.url.startswith(store.url)
        assert child.url != store.url

    @pytest.mark.parametrize("path", HOSTILE_PATHS)
    def test_paths_that_leave_the_store_are_refused(self, store: Store, path: str) -> None:
        put(store, "a", b"1")
        for act in (
            lambda: store.open(path),
            lambda: store.create(path),
            lambda: store.publish(path, b"1" * 20, None),
            lambda: store.delete(path),
            lambda: store.child(path),
            lambda: store.list(path or ".."),
        ):
            with pytest.raises(BadInput, match="not a path inside a store"):
                act()
        assert store.list() == ["a"]
