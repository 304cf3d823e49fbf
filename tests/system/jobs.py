"""What the ranks of the system tests do; importable by spawned processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

import holdfast
from holdfast import events

L, E, H, F = 2, 8, 64, 48
EP = 4


def tensor(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """The whole of a logical tensor: a pure function of its name and the step."""
    seed = sum((i + 1) * byte for i, byte in enumerate(name.encode())) * 1000 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moe_state(rank: int, step: int, world: int = 8, ep: int = EP) -> dict[str, Any]:
    """Experts over ep ranks, replicated over the rest; dense weights on every rank; objects; RNG state."""
    dp = world // ep
    here, copy = rank % ep, rank // ep
    model: dict[str, Any] = {}
    for layer in range(L):
        model[f"layers.{layer}.attn.weight"] = tensor(f"attn{layer}", (H, H), step)
        for name, shape in (("w1", (E, 2 * F, H)), ("w2", (E, H, F))):
            whole = tensor(f"{name}{layer}", shape, step)
            mine = E // ep
            part = whole[here * mine : (here + 1) * mine].clone()
            model[f"layers.{layer}.experts.{name}"] = holdfast.Shard(
                part, shape, (here * mine, *(0 for _ in shape[1:])), (copy, dp)
            )
    return {"model": model, "step": step, "lr": 1e-3, "rng": holdfast.PerRank(torch.full((4,), rank))}


def check_state(state: dict[str, Any], rank: int, step: int, world: int = 8, ep: int = EP) -> None:
    """Every value is that of the step, bit for bit."""
    want = moe_state(rank, step, world, ep)
    for name, value in want["model"].items():
        have = state["model"][name]
        a, b = (v.tensor if isinstance(v, holdfast.Shard) else v for v in (have, value))
        assert torch.equal(a, b), name
    assert state["step"] == step
    assert state["rng"].value.tolist() == [rank] * 4


def blank(rank: int, world: int = 8, ep: int = EP) -> dict[str, Any]:
    """The same shapes, other values."""
    state = moe_state(rank, 999, world, ep)
    state["step"] = -1
    state["rng"] = holdfast.PerRank(torch.zeros(4, dtype=torch.int64))
    return state


def save_job(rank: int, path: str, step: int, how: dict[str, Any]) -> float:
    """Save the state of a step; `how` may hold arguments of save and a mishap for some rank."""
    how = dict(how)
    mishap = how.pop("mishap", {}).get(rank)
    change = how.pop("change", {}).get(rank)
    delay = how.pop("delay", {}).get(rank, 0.0)
    state = moe_state(rank, step)
    if change is not None:
        change(state)
    undo = MISHAPS[mishap[0]](*mishap[1:]) if mishap else lambda: None
    time.sleep(delay)
    step = how.pop("steps", {}).get(rank, step)
    begun = time.monotonic()
    try:
        holdfast.save(state, path, step=step, **how)
    except holdfast.errors.HoldfastError as error:
        error.details["returned_after"] = time.monotonic() - begun
        raise
    finally:
        undo()
    return time.monotonic() - begun


def load_job(rank: int, path: str, step: int, how: dict[str, Any]) -> Any:
    """Load and check; returns the report."""
    how = dict(how)
    world, ep = how.pop("world", 8), how.pop("ep", EP)
    state = blank(rank, world, ep)
    report = holdfast.load(state, path, **how)
    check_state(state, rank, step, world, ep)
    return report


def die_at(event: str, share: float = 0.0) -> Any:
    """SIGKILL this process at the first such event with at least a share of its bytes done."""

    def watch(seen: events.Event) -> None:
        done, total = seen.fields.get("bytes_done", 1), seen.fields.get("bytes_total", 1)
        if seen.name == event and done >= share * max(total, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    return events.subscribe(watch)


def pause_at(event: str, flag: str) -> Any:
    """Tell the test (by a file) that the event has come, and stop until it is continued."""

    def watch(seen: events.Event) -> None:
        if seen.name == event and not os.path.exists(flag):
            with open(flag, "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    return events.subscribe(watch)


def interruptible() -> threading.Event:
    """SIGINT raises KeyboardInterrupt in the main thread, also of a suite in the background. The event
    is set when it does."""
    reached = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        reached.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    return reached


def interrupt_at(event: str) -> Any:
    """Ctrl-C, as it were, at an event: SIGINT to this process, once."""
    reached = interruptible()

    def watch(seen: events.Event) -> None:
        if seen.name == event and not reached.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            assert reached.wait(30), "the signal reaches the main thread while this one is still writing"

    return events.subscribe(watch)


def fail_write(number: int) -> Any:
    """Every positioned write of this process fails with an errno."""
    real = os.pwritev

    def broken(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    os.pwritev = broken  # type: ignore[assignment]

    def undo() -> None:
        os.pwritev = real

    return undo


def fail_sync(number: int) -> Any:
    """Every fsync of this process fails with an errno."""
    real = os.fsync

    def broken(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    os.fsync = broken  # type: ignore[assignment]

    def undo() -> None:
        os.fsync = real

    return undo


def die_before_call(number: int) -> Any:
    """SIGKILL before the number-th call that changes a file system."""
    from tests.support.crash import die_before

    die_before(number)
    return lambda: None


MISHAPS = {
    "interrupt": interrupt_at,
    "die_before": die_before_call,
    "die": die_at,
    "pause": pause_at,
    "write": fail_write,
    "sync": fail_sync,
}
