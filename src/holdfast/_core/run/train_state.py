"""`TrainState`: step, epoch, data position and random state of a run, in one object."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

import numpy as np
import torch

from holdfast._core.format import objects
from holdfast._core.format.digest import digest
from holdfast._core.layout.ranks import ranks_of, ranks_text
from holdfast._core.protocol.call import find_participants, find_roster
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.state.live import State
from holdfast._core.state.structure import Stateful, is_stateful
from holdfast._core.state.tensors import Merge, PerRank
from holdfast.errors import BadInput, LoadFailed

log = logging.getLogger("holdfast")
_LOADER = "the data loader's state"


class TrainState:
    """Step, epoch and gradient scaler, and each rank's data-loader position and random states.

        train = holdfast.TrainState(loader, scaler=scaler)
        state = {"model": model, "optim": optimizer, "train": train}
        checkpoints.restore(state)
        while train.step < steps: ...

    Random states: Python, NumPy, torch on the CPU, and the current accelerator device. A load restores each
    rank's own. They and the position are read when a save copies the state.

    If the number of ranks has changed, ranks that existed before restore their random states, new ranks seed
    theirs from `seed`, the step and the rank, and states of removed ranks are dropped. Loader positions need
    `merge` then; without it, the load raises LoadFailed on all ranks.

    loader: has `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader. Its state must
        consist of values that a checkpoint can hold (`docs/api.md`). None: no position is saved.
    scaler: a GradScaler, or another object with these methods whose state is the same on all ranks.
    seed: a whole number, the same on all ranks.
    merge: makes this rank's loader state from the saved states, {rank: state}, if the ranks have changed (see
        `holdfast.PerRank`).
    job: the job of the saves and loads, if not all ranks take part in them.

    Raises BadInput for a loader or scaler without these methods.
    """

    def __init__(
        self,
        loader: Stateful | None = None,
        *,
        scaler: Stateful | None = None,
        seed: int = 0,
        merge: Merge | None = None,
        job: Job | None = None,
    ) -> None:
        if loader is not None and not is_stateful(loader):
            raise BadInput(
                f"A {type(loader).__name__} has no state_dict and load_state_dict, so it can't say where it "
                "is in the data.",
                hint="Take StatefulDataLoader of torchdata, which has them.",
            )
        if scaler is not None and not is_stateful(scaler):
            raise BadInput(f"A {type(scaler).__name__} has no state_dict and load_state_dict.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadInput(f"seed must be a whole number, not {seed!r}.")
        self.step: int = 0
        """Number of completed steps; the training loop increments it."""
        self.epoch: int = 0
        """Number of completed epochs; the training loop increments it."""
        self.loader: Stateful | None = loader
        self.scaler: Stateful | None = scaler
        self._seed, self._merge, self._job = seed, merge, job_of(job)

    def state_dict(self) -> State:
        """Return the current state, with `holdfast.PerRank` around this rank's own values."""
        ranks = ranks_text(self._ranks()[1])
        state: State = {"step": self.step, "epoch": self.epoch}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        if self.loader is not None:
            # As one value: a loader that has just begun has other names than one that stands in an epoch. And
            # before the random states: a loader may draw as it begins.
            position = objects.encode(self.loader.state_dict(), _LOADER)
            state["loader"] = {
                "ranks": ranks,
                "state": PerRank(
                    position, optional=self._merge is None, merge=self._merged if self._merge else None
                ),
            }
        state["random"] = {"ranks": ranks, "state": PerRank(_random_states(), optional=True)}
        return state

    def load_state_dict(self, state: State) -> None:
        """Take what `state_dict` returned. Raises LoadFailed for positions in the data of another number of
        ranks; then nothing was taken."""
        rank, everyone = self._ranks()
        is_merged = self._merge is not None
        if self.loader is not None and not is_merged and ranks_of(state["loader"]["ranks"]) != everyone:
            raise LoadFailed(
                f"The positions in the data are those of ranks {state['loader']['ranks']}, and ranks "
                f"{ranks_text(everyone)} load them: a loader can't tell what is left for each rank.",
                rank=rank,
                hint="Go on with the ranks that saved them; or give TrainState(merge=), a rule for them; "
                "or leave the loader out, and let it begin where it should.",
            )
        self.step, self.epoch = int(state["step"]), int(state["epoch"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.loader is not None:
            self.loader.load_state_dict(objects.decode(state["loader"]["state"].value, _LOADER))
        # Last, because the code above may draw random numbers.
        before = ranks_of(state["random"]["ranks"])
        if rank in before:
            _set_random_states(state["random"]["state"].value)
        else:
            _seed_all(f"{self._seed}/{self.step}/{rank}")
        if before != everyone and rank == everyone[0]:
            log.info(
                "Random states were saved by ranks %s; of ranks %s, new ones draw theirs from the seed %d.",
                ranks_text(before),
                ranks_text(everyone),
                self._seed,
            )

    def _merged(self, positions: Mapping[int, bytes]) -> bytes:
        assert self._merge is not None
        states = {rank: objects.decode(position, _LOADER) for rank, position in positions.items()}
        return objects.encode(self._merge(states), _LOADER)

    def _ranks(self) -> tuple[int, tuple[int, ...]]:
        """Return this rank and all participants."""
        roster = find_roster(self._job)
        return roster.rank, find_participants(roster, self._job.ranks())

    def __repr__(self) -> str:
        return f"TrainState(step={self.step}, epoch={self.epoch})"


# -- random states, as tensors and plain values -----------------------------------------------------


def _random_states() -> State:
    version, words, gauss = random.getstate()
    found: State = {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "numpy": _tensors(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if (device := _device()) is not None:
        found[device.type] = torch.get_device_module(device).get_rng_state()
    return found


def _set_random_states(states: State) -> None:
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_arrays(states["numpy"], np.random.get_state(legacy=False)))
    torch.set_rng_state(states["torch"])
    if (device := _device()) is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])


def _seed_all(text: str) -> None:
    number = digest(text.encode())
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.manual_seed(number)  # of all devices


def _device() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _tensors(state: State) -> State:
    """Replace arrays by byte tensors, because torch lacks some of NumPy's dtypes."""
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, dict):
            found[key] = _tensors(value)
        elif isinstance(value, np.ndarray):
            found[key] = torch.from_numpy(value.view(np.uint8).copy())
    return found


def _arrays(state: State, like: State) -> State:
    """Undo `_tensors`. like: a state with arrays of the same dtypes."""
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, dict):
            found[key] = _arrays(value, like[key])
        elif isinstance(like[key], np.ndarray):
            found[key] = value.numpy().view(like[key].dtype)
    return found
