"""Options with their defaults. The environment is read here and nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast._core.base.values import Message, check_switches
from holdfast.errors import BadInput

CHECKS = ("auto", "full", "sample", "off")
MiB = 1 << 20
SECRET = "HOLDFAST_SECRET"
INSTALL = "HOLDFAST_INSTALL"
"""The environment variable with which `holdfast run` makes its processes call `holdfast.install`."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to write and read; the defaults suit a node with a few ranks a GPU or core."""

    check_replicas: str = "auto"
    """Whether a save compares replicas: `full` hashes every replica (about 0.1 s per GB and core), `sample`
    hashes one block of each tensor, `off` none. `auto`: `full` for plain tensors, `sample` for declared
    replicas (DTensor, Shard)."""

    writer_threads: int = 1
    """Number of threads of this process that hash and write, or read and verify."""

    max_file_bytes: int = 64 << 30
    """A rank's data file is continued in another one past this size."""

    split_bytes: int = 1 * MiB
    """Replicas share the writing of a shard in pieces of at least this size."""

    columns: tuple[str, ...] = ()
    """Patterns of names whose large matrices are stored as two to eight column panels, so that a
    tensor-parallel slice along the last axis (Megatron's RowParallelLinear) reads only its own
    bytes. It makes saving and loading those matrices unsliced about half as fast, so none by default."""

    fingerprint: bool = False
    """Store a layout-independent fingerprint of every tensor in the index, so that `holdfast same` compares
    checkpoints without reading their data. Computed from the written bytes, at 4 GB/s per core."""

    host_memory_budget: int | None = None
    """Maximum bytes of host memory on this rank for the copies of all running asynchronous saves. A larger
    state is copied in waves, each written before the next, and the call returns after the last copy. A single
    tensor above the limit is an error. None: no limit."""

    retries: int = 0
    """How many times a failed asynchronous save is retried, on all ranks, before its deadline."""

    link_unchanged: bool = False
    """Do not rewrite bytes that are equal to those of the previous save of the same run; the step gets hard
    links to the files with them, and in an object store its index names them (docs/storage.md). For states
    that change little between saves (LoRA, frozen layers)."""

    keep_failed: bool = False
    """Leave this rank's files of a failed save in place, for a post-mortem."""

    nearest_rng: bool = False
    """megatron-core: if the saved layout had no rank at this rank's coordinates, load the random generator
    state (`rng_state`) of the nearest rank instead of failing."""

    def __post_init__(self) -> None:
        if self.check_replicas not in CHECKS:
            raise BadInput(f"check_replicas must be one of {CHECKS}, not {self.check_replicas!r}.")
        if not isinstance(self.columns, tuple) or not all(
            isinstance(pattern, str) for pattern in self.columns
        ):
            raise BadInput(f"columns must be a tuple of name patterns, not {self.columns!r}.")
        check_switches(
            fingerprint=self.fingerprint,
            link_unchanged=self.link_unchanged,
            keep_failed=self.keep_failed,
            nearest_rng=self.nearest_rng,
        )
        least = {"writer_threads": 1, "max_file_bytes": 1, "split_bytes": 1, "retries": 0}
        if self.host_memory_budget is not None:
            least["host_memory_budget"] = 1
        for name, smallest in least.items():
            value = getattr(self, name)
            # bool is a subclass of int, but True is not a number of bytes.
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise BadInput(f"{name} must be a whole number of at least {smallest}, not {value!r}.")


@dataclass(frozen=True, slots=True)
class Environment:
    """The launcher's settings for this process, from torchrun's environment variables."""

    rank: int
    world_size: int
    incarnation: str
    """Differs between restarts of one job: torchrun keeps its store, and so old messages, across them."""
    local_rank: int
    store: tuple[str, int] | None
    """Host and port of the message store."""
    launcher_has_store: bool
    """Whether torchrun hosts that store, rather than rank 0."""
    secret: str
    """HOLDFAST_SECRET: a key that authenticates messages, for message stores that others can reach."""
    job: str
    """The launcher's name for the job, the same across restarts; empty if it has none."""
    restarts: int
    """How many times the launcher has restarted this job."""


def read_place() -> tuple[int, int]:
    """Read the rank of this process and its world size. A function of its own, because it is called often."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise _bad_number(error) from None


def read_environment() -> Environment:
    """Read torchrun's variables; without them, return a world of one rank."""
    rank, world_size = read_place()
    try:
        env = os.environ
        run = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        # A variable may be set and empty.
        host, port = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT") or "0")
        return Environment(
            rank,
            world_size,
            run,
            int(env.get("LOCAL_RANK", rank)),
            (host, port) if host and port else None,
            env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            env.get(SECRET, ""),
            _job_of(env),
            int(env.get("TORCHELASTIC_RESTART_COUNT") or env.get("SLURM_RESTART_COUNT") or "0"),
        )
    except ValueError as error:
        raise _bad_number(error) from None


def _bad_number(error: ValueError) -> BadInput:
    return BadInput(
        f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT in the environment must be whole numbers ({error})."
    )


def _job_of(env: Mapping[str, str]) -> str:
    """Return torchrun's run id or Slurm's job id, or "". torchrun's default run id, `none`, names no job."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":
        return f"torchrun {run}"
    return f"slurm {env['SLURM_JOB_ID']}" if env.get("SLURM_JOB_ID") else ""


def read_install() -> Message | None:
    """Read the arguments of `holdfast.install` that `holdfast run` gives its processes; None without it."""
    text = os.environ.get(INSTALL, "")
    if not text:
        return None
    with suppress(ValueError):
        arguments = json.loads(text) if text != "1" else {}
        if isinstance(arguments, dict):
            return arguments
    raise BadInput(f"{INSTALL} in the environment must be 1 or a JSON object of arguments, not {text!r}.")


def encode_install(arguments: Mapping[str, object]) -> str:
    """Encode arguments for `read_install`."""
    return json.dumps(arguments)


def event_folder() -> str:
    """Return the run folder that `install` records events in (HOLDFAST_EVENTS); "" for none."""
    return os.environ.get("HOLDFAST_EVENTS", "")


def roll_call_folder() -> str:
    """Return the folder that files of roll calls go to (HOLDFAST_ROLL_CALLS, or else that of the events); ""
    for none, and for a URL."""
    folder = os.environ.get("HOLDFAST_ROLL_CALLS", "") or event_folder()
    return "" if "://" in folder else folder


def model_folders() -> list[str]:
    """Return the folders with tables of model families (HOLDFAST_MODELS; several as in PATH)."""
    return [name for name in os.environ.get("HOLDFAST_MODELS", "").split(os.pathsep) if name]


def may_draw() -> bool:
    """Return whether a bar may be drawn on a terminal: HOLDFAST_BAR is not 0, and TERM not "dumb"."""
    return os.environ.get("HOLDFAST_BAR") != "0" and os.environ.get("TERM") != "dumb"


def ranks_of_this_host(rank: int, world_size: int) -> list[int]:
    """Return the ranks of this host, from torchrun's variables; else an aligned block of 64 ranks."""
    size, local = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("LOCAL_RANK", "")
    if size.isdigit() and local.isdigit() and int(local) < int(size):
        first, most = rank - int(local), int(size)
    else:
        first, most = rank - rank % 64, 64
    return [other for other in range(first, min(first + most, world_size)) if other >= 0] or [rank]


def all_variables() -> dict[str, str]:
    """Return the whole environment, for checks that look for hazards in it."""
    return dict(os.environ)
