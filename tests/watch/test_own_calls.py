"""What a thread calls in C, on what, and what a loop around its pause depends on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast._watch.own_calls import calls_of
from holdfast._watch.own_stacks import stacks_here
from tests.support.waiting import wait_until

STORE: Any = dist.HashStore()  # type: ignore[attr-defined]
SEEN: list[dict[str, str]] = []


class Done(Exception):
    """Ends a function that was looked at."""


def look(*_: object) -> None:
    """Stands for a call in C: looks at the function that calls it."""
    frame: FrameType | None = sys._getframe(1)
    if frame is not None and frame.f_code.co_name == "wait":
        frame = frame.f_back
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    SEEN.append(calls_of(frames))
    raise Done


class Handle(dist.Work):
    def wait(self) -> None:  # type: ignore[override]
        look()

    def is_completed(self) -> bool:
        return False


class Other:
    wait = Handle.wait


clock = SimpleNamespace(sleep=look)
work: Any = Handle()


def looked_at(function: Callable[..., object], *given: object) -> dict[str, str]:
    SEEN.clear()
    with pytest.raises(Done):
        function(*given)
    (found,) = SEEN
    return found


# -- loops --------------------------------------------------------------------------------------------------


def asks_in_its_head(handle: dist.Work) -> None:
    pause = 0.1
    while not handle.is_completed():
        clock.sleep(pause)
        pause = 5.0 if pause < 1 else pause


def asks_in_its_body(handle: dist.Work) -> None:
    while True:
        if handle.is_completed():
            break
        clock.sleep(5)


def asks_a_number_of_times(handle: dist.Work) -> dist.Work:
    for _ in range(100):
        if handle.is_completed():
            return handle
        clock.sleep(5)
    raise TimeoutError


def goes_back_to_ask(handle: dist.Work) -> None:
    while True:
        if not handle.is_completed():
            clock.sleep(5)
            continue
        break


def asks_all(handle: dist.Work) -> None:
    handles = [handle]
    while not all(one.is_completed() for one in handles):
        clock.sleep(5)


def keeps_what_is_pending(handle: dist.Work) -> None:
    pending = [handle]
    while pending:
        pending = [one for one in pending if not one.is_completed()]
        clock.sleep(5)


def keeps_the_answer(handle: dist.Work) -> None:
    done = False
    while not done:
        done = handle.is_completed()
        clock.sleep(5)


def asks_in_a_handler(handle: dist.Work) -> None:
    try:
        raise ValueError
    except ValueError:
        while not handle.is_completed():
            clock.sleep(5)


def asks_the_store(_: dist.Work) -> None:
    here = SimpleNamespace(store=STORE)
    while not here.store.check(["a"]):
        clock.sleep(5)


def only_logs_it(handle: dist.Work) -> None:
    for _ in range(3):
        if handle.is_completed():
            print("done")
        clock.sleep(5)


def asks_behind_its_loop(handle: dist.Work) -> None:
    for _ in range(3):
        clock.sleep(5)
    while not handle.is_completed():
        pass


def sleeps_in_a_loop_of_its_own(handle: dist.Work) -> None:
    while not handle.is_completed():
        while not SEEN:
            clock.sleep(5)


def asks_for_a_file(_: dist.Work) -> None:
    path = SimpleNamespace(exists=lambda: False)
    while not path.exists():
        clock.sleep(5)


@pytest.mark.parametrize(
    ("function", "polls"),
    [
        (asks_in_its_head, "handle"),
        (asks_in_its_body, "handle"),
        (asks_a_number_of_times, "handle"),
        (goes_back_to_ask, "handle"),
        (asks_all, "handle"),
        (keeps_what_is_pending, "handle"),
        (keeps_the_answer, "handle"),
        (asks_in_a_handler, "handle"),
        (asks_the_store, "store"),
        (only_logs_it, ""),
        (asks_behind_its_loop, ""),
        (sleeps_in_a_loop_of_its_own, ""),
        (asks_for_a_file, ""),
    ],
)
def test_a_loop_that_ends_with_a_handle_is_told_from_one_that_does_not(
    function: Callable[..., object], polls: str
) -> None:
    found = looked_at(function, work)
    assert (found["calls"], found.get("polls", "")) == ("sleep", polls)


def test_which_handle_a_loop_asks_is_told_where_it_is_known() -> None:
    number = looked_at(waits, work)["message"]
    assert looked_at(asks_in_its_head, work) == {"calls": "sleep", "polls": "handle", "message": number}
    assert looked_at(asks_all, work) == {"calls": "sleep", "polls": "handle"}


def naps() -> None:
    clock.sleep(5)


def test_the_loop_of_a_caller_counts_if_its_function_has_none() -> None:
    def asks() -> None:
        while not work.is_completed():
            naps()

    assert looked_at(asks).get("polls") == "handle"


# -- objects ------------------------------------------------------------------------------------------------


def waits(handle: dist.Work) -> None:
    handle.wait()


def waits_for_an_attribute(handle: dist.Work) -> None:
    reducer = SimpleNamespace(bucket=SimpleNamespace(handle=handle))
    reducer.bucket.handle.wait()


def waits_for_each(handle: dist.Work) -> None:
    for one in (handle,):
        one.wait()


def waits_in_a_list(handle: dist.Work) -> None:
    [one.wait() for one in (handle,)]  # type: ignore[func-returns-value]


def waits_for_a_global(_: dist.Work) -> None:
    work.wait()


def waits_for_the_last(handle: dist.Work) -> None:
    [handle].pop().wait()


@pytest.mark.parametrize("function", [waits, waits_for_an_attribute, waits_for_each, waits_in_a_list])
def test_what_is_waited_for_is_known(function: Callable[..., object]) -> None:
    assert looked_at(function, work) == looked_at(waits_for_a_global, work)
    found = looked_at(function, work)
    assert found == {"calls": "wait", "on": "handle", "message": found["message"]}
    assert looked_at(function, Handle())["message"] != found["message"]
    assert looked_at(function, Other()) == {"calls": "wait", "on": "other"}


def receives(_: dist.Work) -> None:
    dist.irecv(torch.ones(1), 0).wait()


def sends_in_two_steps(_: dist.Work) -> None:
    send = dist.isend
    send(torch.ones(1), dst=0).wait()


@pytest.mark.parametrize(("function", "handle"), [(receives, "recv"), (sends_in_two_steps, "send")])
def test_a_handle_that_torch_has_just_returned_is_known(
    function: Callable[..., object], handle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("isend", "irecv"):
        monkeypatch.setattr(getattr(dist, name), "__code__", returns_a_handle.__code__)
    assert looked_at(function, work) == {"calls": "wait", "on": "handle", "handle": handle}


def returns_a_handle(*_: object, **__: object) -> object:
    from tests.watch.test_own_calls import Handle

    return Handle()


def test_what_another_call_returns_is_not_looked_up() -> None:
    assert looked_at(waits_for_the_last, work) == {"calls": "wait"}


def test_a_look_leaves_what_locals_has_returned() -> None:
    def keeps() -> Iterator[dict[str, object]]:
        handle, kept = work, locals()
        yield kept
        handle.wait()

    running = keeps()
    kept = next(running)
    kept["more"] = 1
    with pytest.raises(Done):
        next(running)
    assert kept["more"] == 1


def test_a_look_leaves_the_variables_of_a_module() -> None:
    module = {"handle": work, "weight": 1.0}
    with pytest.raises(Done):
        exec("handle.wait()", module)
    assert (module["handle"], module["weight"]) == (work, 1.0)
    assert SEEN[-1]["on"] == "handle"


# -- threads ------------------------------------------------------------------------------------------------


def test_threads_that_wait_for_others_and_for_the_store_are_known() -> None:
    name = "waits in the store"

    def waits_in_the_store() -> None:
        here = STORE
        here.wait([name])

    waiter = threading.Thread(target=waits_in_the_store, name="waiter")
    joiner = threading.Thread(target=waiter.join, name="joiner")
    with futures.ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        done = pool.submit(int)
        done.result()
        running = pool.submit(STORE.wait, [name])
        asker = threading.Thread(target=running.result, name="asker")
        all_of = threading.Thread(target=futures.wait, args=([running, done],), name="all of")
        one_by_one = threading.Thread(target=list, args=(futures.as_completed([running]),), name="one by one")
        for thread in (waiter, joiner, asker, all_of, one_by_one):
            thread.start()

        def names() -> dict[str, dict[str, str]]:
            # A thread of a pool has a number behind its name.
            return {stack.thread.partition("_")[0]: stack.names for stack in stacks_here()}

        def are_known() -> bool:
            found = names()
            idents = {stack.thread.partition("_")[0]: stack.ident for stack in stacks_here()}
            in_the_store = {"calls": "wait", "on": "store"}
            return (
                found["waiter"] == found["pool"] == in_the_store
                and found["joiner"] == {"joins": idents["waiter"]}
                and all(found[one] == {"joins": idents["pool"]} for one in ("asker", "all of", "one by one"))
            )

        wait_until(are_known)
        STORE.set(name, "")
    for thread in (waiter, joiner, asker, all_of, one_by_one):
        thread.join()
