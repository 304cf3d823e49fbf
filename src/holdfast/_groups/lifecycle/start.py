"""An `init_process_group` that names missing ranks: ranks first synchronize on the store, with a deadline."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from holdfast._core.base.options import Environment, read_environment
from holdfast._core.base.values import Message
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.torch_store import TorchRoster
from holdfast._core.torch_private import TorchStore
from holdfast._groups.lifecycle.device import Device
from holdfast.errors import BadInput, GroupsFailed, RosterLost, first_line

_stores: dict[tuple[str, int], TorchStore] = {}
"""Stores that this process has opened, by host and port. They stay open: other ranks may still read them, and
the next start reuses them. They are released once all ranks have started with another one."""


class _Start(CollectiveTask):
    """Initialise torch.distributed once all ranks have arrived with the same arguments."""

    def __init__(self, store: TorchStore, env: Environment, backend: str | None, call: Call) -> None:
        super().__init__("start of torch.distributed", "groups://start", call)
        self._store, self._env, self._backend = store, env, backend
        self._timeout = call.deadline.seconds
        self._device = Device(uses_gpu=torch.cuda.is_available())

    def contribute(self) -> Message:
        return {
            "world size": self._env.world_size,
            "backend": self._backend,
            "timeout": self._timeout,
            "torch": str(torch.__version__),
        }

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        first = self.roster.rank
        for rank, message in sorted(contributions.items()):
            for what, value in message.items():
                if value != contributions[first][what]:
                    raise BadInput(
                        f"Ranks differ in {what}: {contributions[first][what]!r} on rank {first}, {value!r} "
                        f"on rank {rank}.",
                        rank=rank,
                    )
        token = secrets.token_hex(6)  # a new prefix, because the store may hold keys of an earlier start
        return {rank: {"token": token} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        self._device.use()
        self.doing("in init_process_group")
        try:
            name = f"holdfast-{answer['token']}/default_pg"
            store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
            dist.init_process_group(
                self._backend,
                store=store,
                rank=self._env.rank,
                world_size=self._env.world_size,
                timeout=timedelta(seconds=self._timeout),
            )
        except Exception as error:
            raise GroupsFailed(
                f"init_process_group met {type(error).__name__}: {first_line(error)}"
            ) from error
        return {}


def start_world(backend: str | None, timeout: float, job: Job) -> None:
    """Initialise torch.distributed from torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    LOCAL_RANK)."""
    env = read_environment()
    if torch.cuda.is_available():
        # Modulo, because a launcher may expose only one GPU to each process, whatever its local rank.
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    store = _store(env, timeout)
    roster = TorchRoster(store, env.rank, env.world_size)
    _Start(store, env, backend, begin_call(replace(job, roster=roster))).run()
    for old in set(_stores) - {env.store}:
        _stores.pop(old)


def _store(env: Environment, timeout: float) -> TorchStore:
    """Open the TCPStore of the job, or return the one that is open."""
    if env.store is None:
        raise BadInput(
            "MASTER_ADDR and MASTER_PORT must be in the environment to start torch.distributed.",
            hint="Start the job with torchrun, or call init_process_group before holdfast.session.",
        )
    if env.store in _stores:
        return _stores[env.store]
    host, port = env.store
    try:
        # The store does not wait for all ranks: `_Start` does that, and names who is missing.
        made = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=env.rank == 0 and not env.launcher_has_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RosterLost(
            f"Rank {env.rank} could not open the message store at {host}:{port} within {timeout:g} s: "
            f"{first_line(error)}",
            hint="Rank 0, or torchrun on that host, hosts it; see whether it has started, and whether the "
            "port is free.",
        ) from None
    _stores[env.store] = made
    return made
