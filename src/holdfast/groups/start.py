"""`init_process_group` that names the ranks which do not come: they meet on the store first, under a deadline."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import BadInput, RosterLost
from holdfast.flow.turn import Turn
from holdfast.options import Environment, read_environment
from holdfast.roster.base import Message
from holdfast.roster.torch_store import TorchRoster


class _Meeting(Turn):
    """All ranks are here."""

    def act(self, answer: Message) -> Message:
        return {}


def start_world(backend: str | None, timeout: float, stall_timeout: float) -> None:
    """Initialise torch.distributed from torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK)."""
    env = read_environment()
    if torch.cuda.is_available():
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    store = _store(env, timeout)
    roster = TorchRoster(store, env.rank, env.world_size)
    _Meeting(
        "start of torch.distributed", "groups://start", roster, timeout=timeout, stall_timeout=stall_timeout
    ).run()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default_pg", store),  # type: ignore[attr-defined]
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout),
    )


def _store(env: Environment, timeout: float) -> Any:
    if env.store is None:
        raise BadInput(
            "MASTER_ADDR and MASTER_PORT must be in the environment to start torch.distributed.",
            hint="Start the job with torchrun, or call init_process_group before holdfast.session.",
        )
    host, port = env.store
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=env.rank == 0 and not env.launcher_has_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RosterLost(
            f"Rank {env.rank} could not reach the message store at {host}:{port} within {timeout:g} s: {str(error).splitlines()[0]}",
            hint="Rank 0, or torchrun on that host, opens it; see whether it has started.",
        ) from None
