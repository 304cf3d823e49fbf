"""Actors of a Ray cluster as a trainer of verl has them: some train, each a rank; others have no part in
it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.frameworks.megatron.models import Layout


class Trainer:
    """A worker that trains: one rank, and verl's own manager over a small real model.

    `install()` is its first line; sessions and the warm-up of groups are on, as by default.
    """

    def __init__(self, rank: int, timeout: float, stall_timeout: float, nearest_rng: bool = False) -> None:
        import holdfast

        holdfast.install(
            job=holdfast.Job(
                timeout=timeout,
                stall_timeout=stall_timeout,
                options=holdfast.Options(nearest_rng=nearest_rng),
            )
        )
        import torch

        from tests.frameworks.verl.jobs import import_verl

        torch.set_num_threads(1)
        os.environ.update(
            {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
        )
        self.rank = rank
        import_verl()

    def pid(self) -> int:
        return os.getpid()

    def open(self, address: str, world: int, layout: Layout) -> None:
        """Groups, model and optimizer. address: where the ranks meet; rank 0 hosts it."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        from tests.frameworks.megatron.models import Training
        from tests.frameworks.verl.jobs import SMALL

        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=world)
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, layout.vpp, expert_model_parallel_size=layout.ep
        )
        self.run = Training(layout, SMALL, seed=3)

    def steps(self, count: int) -> list[float]:
        """Losses of training."""
        return [self.run.step() for _ in range(count)]

    def save(self, folder: str, in_background: bool = False) -> None:
        self._manager(in_background).save_checkpoint(folder, global_step=self.run.iteration)

    def load(self, folder: str, iteration: int) -> None:
        self._manager(False).load_checkpoint(folder)
        self.run.iteration = iteration

    def finalize(self) -> None:
        """What verl's trainer calls on its workers at every step, and once more at its end."""
        from verl.workers.engine_workers import TrainingWorker

        TrainingWorker.async_calls_finalize_fn_exec(self, blocking=True)

    def finalizing_workers(self) -> list[str]:
        """Classes of verl's workers that have the method which its trainer calls."""
        from verl.workers import engine_workers

        kinds = (engine_workers.ActorRolloutRefWorker, engine_workers.TrainingWorker)
        return [kind.__name__ for kind in kinds if hasattr(kind, "async_calls_finalize_fn_exec")]

    def dawdle(self, enough: str, seconds: float) -> None:
        """Be somewhere else until there is a file; for so many seconds at most."""
        ends = time.monotonic() + seconds
        while not os.path.exists(enough) and time.monotonic() < ends:
            time.sleep(0.05)

    def _manager(self, in_background: bool) -> Any:
        from tests.frameworks.verl.jobs import CONTENTS, manager_of

        return manager_of(self.run, CONTENTS, async_save=in_background)


class Idle:
    """A worker that infers: it has no part in training."""

    def pid(self) -> int:
        return os.getpid()
