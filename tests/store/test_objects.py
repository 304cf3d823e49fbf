"""Checkpoints in an object store: what a path does, a URL does; in how many requests; and what errors say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import holdfast
import holdfast.dcp as dcp
from holdfast._core.store import object_client, object_publish, object_writer
from holdfast._core.store.base import NotFound, Store, open_known
from holdfast._core.store.local import open_store
from holdfast._core.store.object_errors import explained
from holdfast._core.store.schemes import environment
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError, StorageError
from tests.support.object_servers import BUCKET, Asked, Proxy, forward, lies, s3_environment
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("deletions_are_waited_for")
ALONE = holdfast.Job(no_dist=True)
SOURCE = str(Path(holdfast.__file__).parents[1])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end soon."""
    for name, seconds in (("READ", 0.4), ("REQUEST", 5.0), ("PATIENCE", 1.0)):
        for module in (object_client, object_publish):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, seconds)


def state(step: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"model.w": torch.randn(300, 70), "model.b": torch.randn(9)}


def zeros(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- what a path does, a URL does -----------------------------------------------------------------------


def test_save_load_and_overwrite(proxy: Proxy, place: str) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place}/it/", step=step, job=ALONE)
        back = zeros(state())
        holdfast.load(back, f"{place}/it", job=ALONE)
        assert same(back, state(step))
    with holdfast.open(f"{place}/it") as checkpoint:
        assert checkpoint.step == 2
    data = open_store(f"{place}/it").list("data")
    assert len(data) == 1, "what the first save wrote is deleted"
    with pytest.raises(HoldfastError, match="holds no committed checkpoint: it does not exist"):
        holdfast.load(back, f"{place}/other", job=ALONE)


def test_a_run_saved_by_the_writer_process(proxy: Proxy, place: str) -> None:
    with holdfast.Checkpoints(place, keep=2, job=ALONE) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, state(step))
    assert holdfast.latest(place) == f"{place}/step-00000004"
    with holdfast.Checkpoints(place, job=ALONE) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        back = zeros(state())
        assert checkpoints.restore(back) == 4
        assert same(back, state(4))
    names = open_store(place).list()
    assert names == ["step-00000003/", "step-00000004/"]


def test_a_large_save_goes_in_parts(proxy: Proxy, place: str) -> None:
    large = {"w": torch.randn(12 << 20)}  # 48 MiB
    proxy.requests()
    holdfast.async_save(large, place, job=ALONE).committed()
    seen = proxy.requests()
    assert sum(line.startswith("PUT") and "/data/" in line for line in seen) == 3
    back = zeros(large)
    proxy.requests()
    holdfast.load(back, place, job=ALONE)
    assert same(back, large)
    reads = [line for line in proxy.requests() if line.startswith("GET") and "/data/" in line]
    assert len(reads) <= 48 // 16 + 1, reads


def test_a_large_load_reads_several_parts_at_once(proxy: Proxy, place: str) -> None:
    large = {f"w{number}": torch.randn(4 << 20) for number in range(4)}  # 64 MiB
    holdfast.save(large, place, job=ALONE)
    lock, now, most = threading.Lock(), [0], [0]

    def slowly(asked: Asked) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.3)
        with lock:
            now[0] -= 1
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = slowly
    back = zeros(large)
    holdfast.load(back, place, job=ALONE)
    assert same(back, large)
    assert most[0] == 4


def test_dcp(proxy: Proxy, place: str) -> None:
    dcp.save(state(), checkpoint_id=place, no_dist=True)
    back = zeros(state())
    dcp.load(back, checkpoint_id=place, no_dist=True)
    assert same(back, state())


def test_commands(proxy: Proxy, place: str, tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place}/step-{step:08d}", step=step, job=ALONE)
    one, two = f"{place}/step-00000001", f"{place}/step-00000002"

    def run(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli, arguments, prog_name="holdfast")
        return found.exit_code, " ".join(found.output.split())

    assert run("latest", place) == (0, two)
    for arguments in (("inspect", one), ("inspect", place), ("verify", place), ("same", one, one)):
        code, output = run(*arguments)
        assert code == 0, output
    assert run("diff", one, two)[0] == 1
    code, output = run("prune", place, "--keep", "2")
    assert code == 0, output
    assert "2 committed steps kept" in output
    code, output = run("export", "torch_dist", one, f"{place}/out")
    assert code != 0
    assert "An export to torch_dist needs a local path, not s3://" in output
    assert run("export", "torch_dist", one, str(tmp_path / "out"))[0] == 0
    code, output = run("import", "torch_dist", str(tmp_path / "out"), f"{place}/in")
    assert code == 0, output
    back = zeros(state())
    holdfast.load(back, f"{place}/in", job=ALONE)
    assert same(back, state(1))


# -- requests -----------------------------------------------------------------------------------------


def test_budgets_of_requests(proxy: Proxy, place: str) -> None:
    holdfast.save(state(), f"{place}/first", job=ALONE)  # tries the bucket, once in a process
    proxy.requests()
    holdfast.save(state(), f"{place}/it", job=ALONE)
    assert len(proxy.requests()) <= 3 + 1
    holdfast.load(zeros(state()), f"{place}/it", job=ALONE)
    assert len(proxy.requests()) <= 1 + 1
    holdfast.save(state(), f"{place}/step-00000001", job=ALONE)
    proxy.requests()
    holdfast.load(zeros(state()), f"{place}/step-00000001", job=ALONE)
    assert len(proxy.requests()) <= 1 + 1 + 2  # its pin
    with holdfast.Checkpoints(f"{place}/run", keep=3, asynchronous=False, job=ALONE) as checkpoints:
        for step in range(1, 4):
            checkpoints.save(step, state(step))
            seen = proxy.requests()
            assert len(seen) <= (11 if step > 1 else 12) + 1, seen
        checkpoints.save(4, state(4))
        assert len(proxy.requests()) <= 11 + 1 + 12  # and step 1 is removed
        with holdfast.open(f"{place}/run/step-00000002"):
            proxy.requests()
            checkpoints.save(5, state(5))
            assert len(proxy.requests()) <= 11 + 1 + 12 + 6  # and step 2 is being read
        proxy.requests()
        checkpoints.save(6, state(6))
        assert checkpoints.steps() == [4, 5, 6]
    proxy.requests()
    with holdfast.Checkpoints(f"{place}/run", asynchronous=False, job=ALONE) as checkpoints:
        checkpoints.delete(6)
        checkpoints.delete(5)
    proxy.requests()
    assert holdfast.latest(f"{place}/run") == f"{place}/run/step-00000004"
    assert len(proxy.requests()) == 2


def test_the_looks_before_a_save_are_made_at_once(proxy: Proxy, place: str) -> None:
    both = threading.Barrier(2)

    def together(asked: Asked) -> Any:
        if asked.method in ("GET", "HEAD"):
            both.wait(30)
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    holdfast.save(state(), f"{place}/first", job=ALONE)
    proxy.change = together
    holdfast.save(state(), f"{place}/it", job=ALONE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_files_of_other_processes_are_read_back(proxy: Proxy, place: str, ranks: int) -> None:
    holdfast.save(state(), f"{place}/first", job=ALONE)
    proxy.requests()
    with ProcessWorld(ranks, env=s3_environment(proxy.port)) as world:
        world.run(save_own, f"{place}/it", timeout=60)
    read = [line.split()[1] for line in proxy.requests() if line.startswith("GET") and "/data/" in line]
    assert len(read) == ranks - 1
    assert all("-r00001" in path for path in read)


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (0, 1),
        (16 << 20, 1),
        (96 << 20, 6),
        (128 << 20, 8),
        (17 << 20, 2),
    ],
)
def test_a_header_and_an_index_make_no_part_more(size: int, parts: int) -> None:
    part = object_writer.part_bytes(size)
    assert -(-max(size + size // 100, 1) // part) == parts
    assert part >= 16 << 20
    assert -(-(1 << 42) // object_writer.part_bytes(1 << 42)) <= object_writer.MOST_PARTS


def test_the_newest_of_many_uncommitted_steps_is_found_in_few_round_trips(proxy: Proxy, place: str) -> None:
    store = open_store(place)
    for step in range(1, 41):
        name = f"step-{step:08d}/" + ("index.safetensors" if step == 10 else "data/a")
        writer = store.create(name)
        writer.write_at(0, [b"1" * 99])
        writer.finish()
    proxy.requests()
    assert holdfast.latest(place) == f"{place}/step-00000010"
    # 31 indexes and the markers of 30 steps: one after the other, and with a list each, 4 times as many.
    assert len(proxy.requests()) <= 1 + 2 * 33


@pytest.mark.parametrize(
    "found",
    wide(["exp-17/trainer_state.json", "exp-3/model.safetensors", ""], suite=["exp-17/trainer_state.json"]),
)
def test_other_folders_are_looked_at_many_at_once(proxy: Proxy, place: str, found: str) -> None:
    store, folders = open_store(place), 40
    for path in [*(f"exp-{number}/notes.txt" for number in range(folders)), *filter(None, [found])]:
        rewrite(store, path, b"x")
    lock, now, most, many = threading.Lock(), [0], [0], threading.Event()

    def together(asked: Asked) -> Any:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if now[0] > 16:
            many.set()
        if asked.method == "HEAD":
            many.wait(20)
        with lock:
            now[0] -= 1
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = together
    # One that may not be read hides none of those that are looked at together with it.
    proxy.rule = lambda method, path, query, number: "denied" if "/exp-39/" in path else "pass"
    proxy.requests()
    if found:
        with pytest.raises(BadInput, match=f"but '{found.partition('/')[0]}' in it is one"):
            holdfast.latest(place)
    else:
        assert holdfast.latest(place) is None
    seen = proxy.requests()
    assert sum(line.startswith("LIST") for line in seen) <= 3, seen
    assert 16 < most[0] <= 32


# -- data files that are opened without a request ------------------------------------------------------------


def large() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(8.0 * (1 << 20))}  # 32 MiB, so two reads


def data_file_of(place: str) -> tuple[Store, str, bytes]:
    store = open_store(place)
    [name] = store.list("data")
    reader = store.open(f"data/{name}")
    return store, f"data/{name}", reader.read(0, reader.size)


def rewrite(store: Store, path: str, data: bytes) -> None:
    writer = store.create(path)
    writer.write_at(0, [data])
    writer.finish()


@pytest.mark.parametrize("left", [1000, (17 << 20) + 5, -1, 1 << 40])
def test_a_data_file_of_another_size_is_damage_before_a_byte_is_used(
    proxy: Proxy, place: str, left: int
) -> None:
    holdfast.save(large(), place, job=ALONE)
    store, path, data = data_file_of(place)
    rewrite(store, path, data[:left] if left < len(data) else data + b"more")
    back = zeros(large())
    with pytest.raises(
        CorruptCheckpoint, match=r"bytes, but was written with \d+: it is truncated or replaced"
    ):
        holdfast.load(back, place, job=ALONE)
    assert not back["w"].any()


def test_a_missing_data_file_is_told(proxy: Proxy, place: str) -> None:
    holdfast.save(large(), place, job=ALONE)
    store, path, _ = data_file_of(place)
    store.delete(path)
    with pytest.raises(CorruptCheckpoint, match=r"A data file of .* is missing"):
        holdfast.load(zeros(large()), place, job=ALONE)


def test_reads_that_begin_at_once_are_of_one_version(proxy: Proxy, place: str) -> None:
    store = open_store(place)
    rewrite(store, "a", b"1" * 300_000)
    reader = open_known(store, "a", 300_000, 0, 300_000)
    assert proxy.requests()[1:] == []
    assert reader.read(0, 100_000) == b"1" * 100_000
    rewrite(store, "a", b"2" * 300_000)
    with pytest.raises(NotFound, match="was replaced since it was opened"):
        reader.read(100_000, 100_000)
    # Both have begun before the first answer, so neither has a condition.
    other = open_known(store, "a", 300_000, 0, 300_000)
    gate, second = threading.Barrier(2), threading.Event()

    def between(asked: Asked) -> Any:
        if asked.method == "GET" and gate.wait(30):
            second.wait(30)
        return forward(asked.port, asked.method, asked.path, asked.headers, asked.body)

    proxy.change = between
    found: list[bytes | HoldfastError] = []

    def read(start: int) -> None:
        try:
            found.append(other.read(start, 100_000))
        except HoldfastError as error:
            found.append(error)
        if len(found) == 1:
            proxy.change = None
            rewrite(store, "a", b"3" * 300_000)
            second.set()

    threads = [threading.Thread(target=read, args=(start,)) for start in (0, 200_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(map(type, found), key=str) == [bytes, NotFound], found


# -- errors ---------------------------------------------------------------------------------------------

WRITES, ALL = ("PUT", "POST"), ("PUT", "POST", "GET", "HEAD")


@pytest.mark.parametrize(
    ("fault", "methods", "says"),
    [
        ("denied", WRITES, "these credentials may not write objects (s3:PutObject"),
        ("denied", ALL, "these credentials may not read objects (s3:GetObject"),
        ("expired", WRITES, "the token of these credentials has expired"),
        ("nobucket", ALL, "there is no s3://bucket."),
        ("region", ALL, "is in another region"),
        ("unknown", WRITES, "does not know such requests"),
        ("503", WRITES, "it asks to be asked less often (SlowDown), and went on for"),
        ("hang", WRITES, "it gave no answer in time"),
    ],
)
def test_an_error_is_a_sentence(
    proxy: Proxy, place: str, hasty: None, fault: str, methods: tuple[str, ...], says: str
) -> None:
    proxy.rule = lambda method, path, query, number: fault if method in methods else "pass"
    begun = time.monotonic()
    with pytest.raises(HoldfastError) as caught:
        holdfast.save(state(), place, job=holdfast.Job(no_dist=True, timeout=30.0))
    assert says in str(caught.value)
    assert time.monotonic() - begun < 15
    for secret in ("very-secret", "AWS4-HMAC", "Signature", "127.0.0.1"):
        assert secret not in str(caught.value)
    proxy.rule = lambda *_: "pass"
    assert holdfast.latest(place) is None


@pytest.mark.parametrize("fate", ["denied", "pass"])
@pytest.mark.parametrize(
    ("place", "give"),
    [
        ("s3://bucket/run", "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("az://bucket/run", "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_without_credentials_a_sentence_says_how_to_give_them(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, hasty: None, place: str, give: str, fate: str
) -> None:
    """The host's service of roles is asked then. That it knows none is no missing object: no fresh start."""
    for name in environment():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://127.0.0.1:{proxy.port}/metadata/identity/oauth2/token")
    proxy.rule = lambda *_: fate
    proxy.change = lambda asked: (404, [], b"")
    for call in (
        lambda: holdfast.latest(place),
        lambda: holdfast.load(state(), f"{place}/it", job=ALONE),
        lambda: holdfast.save(state(), f"{place}/it", job=ALONE),
        lambda: open_store(place).publish("index", b"1" * 64, None),
    ):
        with pytest.raises(StorageError, match="there are no credentials in the environment") as caught:
            call()
        assert give in str(caught.value)


def test_no_storage_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment():
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"no storage account is named\. Set AZURE_STORAGE_ACCOUNT_NAME"):
        holdfast.latest("az://container/run")


def test_what_may_not_be_done_without_credentials(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    proxy.rule = lambda *_: "denied"
    with pytest.raises(StorageError, match=r"there are no credentials \(AWS_SKIP_SIGNATURE is set\)"):
        holdfast.save(state(), place, job=ALONE)


def test_a_missing_bucket_is_no_fresh_start(proxy: Proxy) -> None:
    with (
        holdfast.Checkpoints("s3://nobody-made-it/run", job=ALONE) as checkpoints,
        pytest.raises(HoldfastError, match="there is no s3://nobody-made-it"),
    ):
        checkpoints.restore(state())


def test_a_server_that_ignores_conditions_is_refused(
    server: int, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    liar = Proxy(server, lies)
    for name, value in s3_environment(liar.port).items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(
            HoldfastError, match=r"s3://bucket can't hold checkpoints: its server ignores cond"
        ):
            holdfast.save(state(), place, job=ALONE)
        assert holdfast.latest(place) is None
        assert open_store(place).list() == []
    finally:
        liar.close()


def test_a_request_without_an_answer_proves_no_condition(
    server: int, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    liar = Proxy(server, lies)
    for name, value in s3_environment(liar.port).items():
        monkeypatch.setenv(name, value)
    tries: list[str] = []

    def rule(method: str, path: str, query: str, number: int) -> str:
        tries.extend([path] if method == "PUT" and object_publish.PROBE in path else [])
        return "drop" if method == "PUT" and object_publish.PROBE in path and len(tries) == 2 else "pass"

    liar.rule = rule
    try:
        with pytest.raises(StorageError, match="its server ignores conditions of writes"):
            open_store(place).publish("index", b"1" * 64, None)
        assert len(tries) == 3
        assert open_store(place).list() == []
    finally:
        liar.close()


def test_a_trial_without_an_answer_is_no_doubt_about_the_index(proxy: Proxy, place: str, hasty: None) -> None:
    proxy.rule = lambda method, path, query, number: "drop" if object_publish.PROBE in path else "pass"
    with pytest.raises(StorageError, match="could not be tried before the first publishing") as caught:
        open_store(place).publish("index", b"1" * 64, None)
    assert type(caught.value) is StorageError
    proxy.rule = lambda *_: "pass"
    assert open_store(place).list() == []


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://user:very-secret@bucket/x", "s3://bucket/../x", "s3://bucket/x\n"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        open_store(url)
    assert "very-secret" not in str(caught.value)


# -- processes ------------------------------------------------------------------------------------------


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )


def test_neither_the_library_nor_the_command_line_imports_obstore() -> None:
    code = "import sys, holdfast, holdfast._tools.cli; print([m for m in sys.modules if m.startswith('obstore')])"
    assert start(code).communicate(timeout=120)[0] == "[]\n"


def test_without_the_extra_a_sentence_says_what_to_install() -> None:
    code = """
        import sys
        sys.modules["obstore"] = None
        import holdfast
        try:
            holdfast.latest("s3://bucket/run")
        except holdfast.errors.StorageError as error:
            print(error)
    """
    said = start(code).communicate(timeout=120)[0]
    assert "need the package obstore" in said
    assert "pip install 'torch-holdfast[object]'" in said


def test_a_fork_after_the_first_use_is_refused_and_its_parent_goes_on(proxy: Proxy, place: str) -> None:
    code = """
        import os, sys, holdfast
        from holdfast._core.store.local import open_store
        store = open_store(sys.argv[1])
        store.publish("a", b"1" * 40, None)
        child = os.fork()
        if not child:
            try:
                open_store(sys.argv[1]).list()
            except holdfast.errors.StorageError as error:
                os._exit(7 if "was forked from process" in str(error) else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.list())
    """
    process = start(code, place)
    try:
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert said == "7 ['a']\n", errors
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_in_a_request(proxy: Proxy, place: str, number: signal.Signals) -> None:
    proxy.rule = lambda *_: "hang"
    code = """
        import signal, sys, holdfast
        def stop(*_):
            raise SystemExit(5)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        print("begins", flush=True)
        try:
            holdfast.latest(sys.argv[1])
        except KeyboardInterrupt:
            raise SystemExit(5)
    """
    process = start(code, place)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        ends = time.monotonic() + 30
        while not proxy.requests():
            assert time.monotonic() < ends
            time.sleep(0.05)
        process.send_signal(number)
        begun = time.monotonic()
        assert process.wait(20) == 5
        assert time.monotonic() - begun < 3
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_save_that_hangs_ends_at_its_deadline(proxy: Proxy, place: str) -> None:
    holdfast.save(state(), f"{place}/first", job=ALONE)
    proxy.rule = lambda method, path, query, number: "hang" if method == "PUT" else "pass"
    begun = time.monotonic()
    with pytest.raises(HoldfastError, match="no answer"):
        holdfast.save(state(), f"{place}/it", job=holdfast.Job(no_dist=True, timeout=2.0))
    assert time.monotonic() - begun < 6


def test_it_is_a_storage_error(proxy: Proxy) -> None:
    proxy.rule = lambda *_: "denied"
    with pytest.raises(StorageError) as caught:
        open_store(f"s3://{BUCKET}/x").list()
    assert isinstance(caught.value, OSError)


# -- several ranks --------------------------------------------------------------------------------------


def saves(rank: int, place: str) -> str:
    whole = torch.arange(40.0).reshape(8, 5)
    mine = holdfast.Shard(whole[4 * rank : 4 * rank + 4].clone(), (8, 5), (4 * rank, 0))
    with holdfast.Checkpoints(place, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": mine, "step": step})
    return holdfast.latest(place) or ""


def save_own(rank: int, place: str) -> None:
    holdfast.save({"w": holdfast.PerRank(torch.zeros(9))}, place)


def dies(rank: int, place: str) -> str:
    if rank == 1:
        from holdfast._core.store import object_writer

        def die(self: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        object_writer.ObjectWriter.finish = die  # type: ignore[method-assign]
    try:
        holdfast.save({"w": holdfast.PerRank(torch.zeros(9))}, place)
    except HoldfastError as error:
        return str(error)
    return "saved"


def test_two_ranks(proxy: Proxy, place: str) -> None:
    with ProcessWorld(2, env=s3_environment(proxy.port)) as world:
        assert world.run(saves, place) == [f"{place}/step-00000002"] * 2
    back = {"w": torch.zeros(8, 5)}
    holdfast.load(back, f"{place}/step-00000002", job=ALONE)
    assert back["w"].flatten().tolist() == [float(number) for number in range(40)]


def test_a_rank_that_is_killed_in_its_upload_commits_nothing(proxy: Proxy, place: str) -> None:
    with ProcessWorld(2, env=s3_environment(proxy.port)) as world:
        world.start(dies, place)
        alive, dead = world.collect(60)
    assert dead.died == -signal.SIGKILL
    assert "rank 1" in alive.value
    assert "killed" in alive.value or "SIGKILL" in alive.value
    assert holdfast.latest(place) is None


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("status code: 503, body: <Code>SlowDown</Code>", "it asks to be asked less often (SlowDown)"),
        ("status code: 503, no body", "it answered with status 503, and this went on for 7 s"),
        ("status code: 500, body: <Code>InternalError</Code>", "it answered with status 500 (InternalError)"),
        ("status code: 403, body: <Code>AccessDenied</Code>", "these credentials may not list the bucket"),
        ("status code: 403, no body", "these credentials may not list the bucket"),
        ("status code: 403, body: <Code>RequestTimeTooSkewed</Code>", "status 403 (RequestTimeTooSkewed)."),
    ],
)
def test_a_sentence_says_no_more_than_the_reply(reply: str, sentence: str) -> None:
    told = explained("Listing", "s3://bucket/run", RuntimeError(reply), 7.0).message
    assert sentence in told
    assert ("less often" in told) == ("SlowDown" in reply)
    assert ("may not" in told) == ("403" in reply and "Skewed" not in reply)
