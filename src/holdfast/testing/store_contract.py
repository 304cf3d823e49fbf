"""A contract test for stores: subclass it, add a `store` fixture, and run it with pytest.

    from holdfast.testing import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)          # an empty one, for each test

The protocol of a save relies on these promises (see `holdfast.interfaces.Store`). For a store that has links,
override `link`, too.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from functools import partial

import pytest

from holdfast._core.store.base import (
    VERSION_BYTES,
    Kind,
    NotFound,
    OtherSize,
    Store,
    capabilities,
    look_at_files,
    open_known,
)
from holdfast.errors import BadInput, Conflict, StorageError
from holdfast.testing.store_actions import content, put, race

HOSTILE_PATHS = (
    "", "/", ".", "..", "../a", "a/../b", "a/..", "/etc/passwd", "a//b", "a/", "./a", "a/./b", "a\0b",
    "../../a/b",
)  # fmt: skip


class StoreContract:
    """Override `store`; everything else is inherited."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("Give the contract a store: override this fixture.")

    def link(self, store: Store, path: str, to: str) -> None:
        """Make `path` a link to `to`, both names in the store. Override it for a store that has links."""
        pytest.skip("this store has no links")

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
        parts = [bytes([index]) * 1000 for index in range(16)]
        writer = store.create("a")
        # Out of order: later writes fill the holes.
        order = [*range(1, 16, 2), *range(0, 16, 2)]
        writes = [partial(writer.write_at, i * 1000, [parts[i][:300], parts[i][300:]]) for i in order]
        assert race(writes) == [None] * 16
        writer.finish()
        assert content(store, "a") == b"".join(parts)

    def test_many_buffers_at_once(self, store: Store) -> None:
        buffers = [
            bytes([index % 256]) * (index % 7) for index in range(3000)
        ]  # more than one system call takes
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
        reader.close()  # closing twice is allowed

    def test_several_threads_read_one_file(self, store: Store) -> None:
        data = bytes(range(256)) * 40
        put(store, "a", data)
        reader = store.open("a")
        starts = range(0, 2000, 100)
        found = race([partial(reader.read, start, 100) for start in starts])
        assert found == [data[start : start + 100] for start in starts]
        reader.close()

    # What a store may be able to do (`Capabilities`); the defaults of others are tested, too.

    def test_a_file_of_known_size(self, store: Store) -> None:
        data = bytes(range(256)) * 1024
        put(store, "a", data)
        for first, length in ((0, len(data)), (1000, 200_000), (1000, 10)):
            reader = open_known(store, "a", len(data), first, length)
            assert reader.size == len(data)
            assert bytes(reader.read(first, length)) == data[first : first + length]
            assert bytes(reader.read(len(data) - 7, 7)) == data[-7:]
            reader.close()

    def test_a_file_of_another_size_than_is_known_is_noticed_before_a_buffer_is_filled(
        self, store: Store
    ) -> None:
        put(store, "a", bytes(range(256)) * 1024)
        for size in (200_000, 300_000):
            buffer = bytearray(150_000)
            reader = open_known(store, "a", size, 0, size)
            found = reader.size
            if found == size:  # it makes no request before the first read
                with pytest.raises(OtherSize) as caught:
                    reader.read_into(0, [buffer])
                found = caught.value.size
            assert found == 256 * 1024
            assert not any(buffer)
            reader.close()

    def test_looks_at_several_files(self, store: Store) -> None:
        for name in ("a", "d/b"):
            put(store, name, b"123")
        look = look_at_files(store, ["a", "d/b", "d/c"])
        assert [(entry.kind, entry.size) for entry in map(look, ("a", "d/b")) if entry is not None] == [
            (Kind.FILE, 3)
        ] * 2
        assert look("d/c") is None

    def test_create_is_exclusive(self, store: Store) -> None:
        if not capabilities(store).exclusive_create:
            pytest.skip("this store says that it creates files of any name (Capabilities.exclusive_create)")
        put(store, "d/a", b"first")
        with pytest.raises(StorageError) as caught:
            store.create("d/a")
        assert caught.value.errno == errno.EEXIST
        assert content(store, "d/a") == b"first"

    def test_of_several_that_create_one_wins(self, store: Store) -> None:
        if not capabilities(store).exclusive_create:
            pytest.skip("this store says that it creates files of any name (Capabilities.exclusive_create)")
        outcomes = race([partial(store.create, "a")] * 8)
        winners = [one for one in outcomes if not isinstance(one, Exception)]
        assert len(winners) == 1
        assert all(isinstance(one, StorageError) for one in outcomes if one is not winners[0])

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
        # The loser's temporary file must not be left.
        assert store.list("d") == ["index"]

    def test_publish_replaces_just_the_version_it_was_told(self, store: Store) -> None:
        first, second, third = (digit * 100 for digit in (b"1", b"2", b"3"))
        with pytest.raises(Conflict):
            store.publish("index", second, first[-VERSION_BYTES:])
        store.publish("index", first, None)
        with pytest.raises(Conflict):
            store.publish("index", second, b"9" * VERSION_BYTES)
        assert content(store, "index") == first
        store.publish("index", second, first[-VERSION_BYTES:])
        with pytest.raises(Conflict):
            store.publish("index", third, first[-VERSION_BYTES:])
        assert content(store, "index") == second
        assert store.list() == ["index"]

    def test_a_reader_keeps_the_version_that_it_opened(self, store: Store) -> None:
        first, second = b"1" * 100, b"2" * 50
        store.publish("index", first, None)
        reader = store.open("index")
        store.publish("index", second, first[-VERSION_BYTES:])
        # A reader of an index must not see half of one version and half of the next.
        assert bytes(reader.read(0, reader.size)) == first
        reader.close()

    # Several times, because a lost race shows only now and then.
    @pytest.mark.parametrize("attempt", range(5))
    def test_of_several_that_publish_one_wins(self, store: Store, attempt: int) -> None:
        versions = [bytes([index]) * 40 for index in range(8)]
        outcomes = race([partial(store.publish, "index", version, None) for version in versions])
        self._one_won(store, outcomes, versions)

    @pytest.mark.parametrize("attempt", range(5))
    def test_of_several_that_replace_one_version_one_wins(self, store: Store, attempt: int) -> None:
        old = b"old" * 40
        store.publish("index", old, None)
        versions = [bytes([index]) * 40 for index in range(8)]
        outcomes = race([partial(store.publish, "index", one, old[-VERSION_BYTES:]) for one in versions])
        self._one_won(store, outcomes, versions)

    @staticmethod
    def _one_won(store: Store, outcomes: list[object], versions: list[bytes]) -> None:
        won = [index for index, one in enumerate(outcomes) if one is None]
        assert len(won) == 1, outcomes
        assert all(isinstance(one, Conflict) for index, one in enumerate(outcomes) if index not in won), (
            outcomes
        )
        assert content(store, "index") == versions[won[0]]
        assert store.list() == ["index"]

    def test_a_chain_of_replacements_loses_none(self, store: Store) -> None:
        """Replace what each thread has read: the count must equal the number of successes."""
        # If two could replace the same version, both would count it.
        count, done = self.chain(store)
        assert count == done

    @staticmethod
    def chain(store: Store) -> tuple[int, int]:
        """Count up from four threads; return the count, and how many times a thread was told that it
        counted."""
        store.publish("count", b"%016d" % 0, None)

        def add() -> object:
            done = 0
            for _ in range(10):
                now = content(store, "count")
                try:
                    # With a token, as versions in real use have one: two writers of equal bytes would
                    # both find their own bytes in place.
                    version = b"%016d" % (int(now[:16]) + 1) + os.urandom(VERSION_BYTES)
                    store.publish("count", version, now[-VERSION_BYTES:])
                    done += 1
                except Conflict:
                    continue
            return done

        done = race([add] * 4)
        return int(content(store, "count")[:16]), sum(int(str(one)) for one in done)

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

    def test_stat_tells_what_a_name_stands_for(self, store: Store) -> None:
        put(store, "a/x", b"123")
        entry = store.stat("a/x")
        assert entry is not None
        assert (entry.kind, entry.size) == (Kind.FILE, 3)
        folder, itself = store.stat("a"), store.stat()
        assert folder is not None
        assert itself is not None
        assert folder.kind == itself.kind == Kind.FOLDER
        for missing in ("b", "a/y", "a/x/y"):
            assert store.stat(missing) is None
        assert store.child("nowhere").stat() is None

    def test_remove_takes_the_folder_itself_once_it_is_empty(self, store: Store) -> None:
        child = store.child("a")
        put(child, "x", b"1")
        assert not child.remove()
        assert content(child, "x") == b"1"
        child.delete("x")
        assert child.remove()
        assert child.remove()  # removing twice is allowed
        assert store.stat("a") is None
        put(child, "x", b"2")  # and it is made again when it is needed
        assert content(store, "a/x") == b"2"

    def test_a_folder_that_vanishes_while_it_is_written_to_is_made_again(self, store: Store) -> None:
        """A failed save removes its empty folders while the next save begins."""
        child, stop = store.child("step"), threading.Event()

        def sweep() -> None:
            while not stop.is_set():
                with suppress(StorageError):  # there is something in it
                    child.delete("data")
                child.remove()

        def write(worker: int) -> object:
            for number in range(20):
                put(child, f"data/{worker}-{number}", b"1")
                child.delete(f"data/{worker}-{number}")
            child.publish(f"index-{worker}", b"2" * 20, None)
            return content(child, f"index-{worker}")

        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        try:
            assert race([partial(write, worker) for worker in range(3)]) == [b"2" * 20] * 3
        finally:
            stop.set()
            sweeper.join(60)

    def test_nothing_is_written_or_deleted_behind_a_link(self, store: Store) -> None:
        put(store, "others/data/x", b"1")
        put(store, "step/y", b"2")
        self.link(store, "step/data", "others/data")
        self.link(store, "linked", "others")
        for act in (
            lambda: store.delete("step/data/x"),
            lambda: store.delete("linked/data/x"),
            lambda: store.child("linked").delete("data/x"),
            lambda: store.child("linked").child("data").delete("x"),
            lambda: store.create("step/data/z"),
            lambda: store.child("linked").create("z"),
            lambda: store.publish("linked/index", b"1" * 20, None),
        ):
            with pytest.raises(StorageError, match="is a link"):
                act()
        assert not store.child("linked").remove()
        assert store.list("others") == ["data/"]
        assert store.list("others/data") == ["x"]
        entries = [store.stat("step/data"), store.stat("linked"), store.child("linked").stat()]
        assert [entry.kind for entry in entries if entry is not None] == [Kind.LINK] * 3

    def test_a_link_is_deleted_as_the_link_it_is(self, store: Store) -> None:
        put(store, "others/x", b"1")
        self.link(store, "folder", "others")
        self.link(store, "file", "others/x")
        for name in ("folder", "file"):
            store.delete(name)
            assert store.stat(name) is None
        assert content(store, "others/x") == b"1"

    def test_links_that_lead_nowhere_are_names_like_any_other(self, store: Store) -> None:
        put(store, "a/x", b"1")
        self.link(store, "loop", "loop")
        self.link(store, "broken", "nothing")
        self.link(store, "good", "a")
        assert store.list() == ["a/", "broken", "good/", "loop"]

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
