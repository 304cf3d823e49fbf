"""`install()` makes the frameworks' own save and load functions call Holdfast, without changes to their code.

verl, Megatron-LM, Megatron-Bridge, NeMo RL and ms-swift all save through `megatron.core.dist_checkpointing`,
so its functions are replaced. The frameworks' own functions around it are guarded: their waits get
deadlines, and errors name the missing rank (`frameworks`). A framework that is not imported yet is changed at
its import. `uninstall()` puts the originals back. Importing Holdfast replaces nothing.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module

from holdfast import events
from holdfast._core.base.deadline import check_seconds
from holdfast._core.base.options import all_variables, event_folder
from holdfast._core.base.threads import within
from holdfast._core.base.values import check_switches
from holdfast._core.process.exits import Stage, at_exit, not_at_exit, uncaught
from holdfast._core.process.heart import heart
from holdfast._core.process.under_way import wait_for_works
from holdfast._core.protocol.call import find_roster
from holdfast._core.protocol.job import Job, defaults, job_of, limits_of
from holdfast._core.roster.base import Roster
from holdfast._core.roster.beacon import Beacon, beacon_of
from holdfast._core.roster.lost import DESTROYED
from holdfast._core.roster.process import stack_dump
from holdfast._core.roster.tcp_client import PATIENCE
from holdfast._core.torch_private import forget_groups
from holdfast._frameworks.framework import Framework
from holdfast._frameworks.frameworks import FRAMEWORKS, NAMES, version_of
from holdfast._frameworks.patching import Patches, Replacement, rebind, undo
from holdfast._frameworks.replacing import guard_of, replacements_of
from holdfast._frameworks.settings import Settings
from holdfast._groups.audit.doctor import serve, stop
from holdfast._groups.audit.known import affects, versions_here
from holdfast._groups.ending.system_exit import forget_exits, how_it_ended, see_exits
from holdfast._groups.lifecycle.state import facts
from holdfast._groups.lifecycle.state import installed as told_by_doctor
from holdfast._groups.lifecycle.warm_up import chosen_operations
from holdfast._watch.roll_call import RollCall
from holdfast.errors import BadInput, HoldfastError

log = logging.getLogger("holdfast")
_C10D = "torch.distributed.distributed_c10d"


@dataclass(frozen=True)
class InstalledFramework:
    """What `install` has changed in one framework in this process."""

    name: str
    version: str
    """The version of the installed distribution; empty if there is none."""
    replaced: tuple[str, ...]
    guarded: tuple[str, ...]
    waiting: tuple[str, ...]
    """Modules that are not imported yet; they are changed at their import."""
    missing: tuple[str, ...]
    """Names that this version does not have."""


class _Installation:
    def __init__(self, settings: Settings, frameworks: list[Framework]) -> None:
        self.settings = settings
        self.beacon: Beacon | None = None
        """The presence beacon of this rank."""
        self.roll_call: RollCall | None = None
        self.end_record: Callable[[], None] | None = None
        """Stops the recording of events."""
        self.frameworks = frameworks
        self.patches = {framework.name: Patches() for framework in frameworks}
        self.own = Patches()
        """Patches for the functions in `guard=[...]`."""
        self.unreached = dict.fromkeys(settings.guarded)
        """Functions in `guard=[...]` that have not been called yet."""
        self.rank: int | None = None
        """The rank of this process, once a default process group has been initialised."""
        self.serves = False
        """Whether this installation started the server for `holdfast doctor`."""

    def begin(self) -> None:
        for framework in self.frameworks:
            self.patches[framework.name].begin(replacements_of(framework, self.settings))
        self.own.begin(
            [
                *_guards(self.settings, lambda place: self.unreached.pop(place, None)),
                Replacement(_C10D, "init_process_group", "watch", self._shown),
                Replacement(_C10D, "destroy_process_group", "watch", self._seen_off),
            ]
        )
        rebind([*self.patches.values(), self.own])
        see_exits(self)
        stack_dump.begin(self)
        at_exit(Stage.SESSIONS, self._say_end)
        self._show()

    def _shown(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap `init_process_group`: afterwards, start the presence beacon, roll calls and the recording of
        events. Through the beacon, other ranks can check whether this process is alive and ask for its stack,
        also before and between calls."""

        @wraps(original)
        def init_process_group(*args: object, **named: object) -> None:
            import torch.distributed as dist

            if self.rank is not None and not dist.is_initialized():  # there was an earlier default group
                forget_groups()
            original(*args, **named)
            self._show()

        return init_process_group

    def _seen_off(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap `destroy_process_group`: wait for running saves, announce that this rank is leaving, and, if
        this process hosts the store, wait until the others have left."""

        @wraps(original)
        def destroy_process_group(*args: object, **named: object) -> None:
            import torch.distributed as dist

            group = args[0] if args else named.get("group")
            if self.beacon is not None and (group is None or group is dist.group.WORLD):
                fails = sys.exception() is not None
                if not fails:
                    wait_for_works(None)
                self.beacon.end(DESTROYED)
                if not fails:
                    self.beacon.see_off()
            original(*args, **named)

        return destroy_process_group

    def _show(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        self.rank = dist.get_rank()
        # Only now: worker processes of data loaders and compilers have RANK set, too.
        if event_folder() and self.end_record is None:
            try:
                self.end_record = events.record(event_folder())
            except BadInput as error:
                log.warning("HOLDFAST_EVENTS: %s", error)  # no reason to end the training
        if "://" in os.environ.get("HOLDFAST_ROLL_CALLS", "") and self.roll_call is None:
            log.warning("HOLDFAST_ROLL_CALLS names no folder, so answers to roll calls go to the log alone.")
        if dist.get_world_size() > 1:
            roster = find_roster(Job())
            _connect(roster)
            self.beacon = beacon_of(roster)
            self.beacon.set_limits(limits_of(self.settings.job))
            self.beacon.keep(self)
            if self.roll_call is not None:  # of an earlier process group
                heart.end(self.roll_call)
            self.roll_call = RollCall(roster)
            heart.begin(self.roll_call)

    def _say_end(self) -> None:
        if uncaught() is None:  # a program that crashed may have done so before its first save
            self.say_unreached()
        if self.beacon is not None:
            self.beacon.end(how_it_ended())
            if uncaught() is None:
                self.beacon.see_off()

    def say_unreached(self) -> None:
        """Warn, on rank 0, of guarded functions that were never called: the program calls another function,
        or bound the original before `install`."""
        if self.unreached and self.rank == 0:
            log.warning(
                "install(guard=...) guarded nothing in %s: this process never called it. Name the function "
                "that your program calls to save, and call install() before the program imports it.",
                ", ".join(self.unreached),
            )

    def end(self) -> None:
        not_at_exit(self._say_end)
        forget_exits(self)
        stack_dump.end(self)
        if self.beacon is not None:
            self.beacon.let_go(self)
        if self.roll_call is not None:
            heart.end(self.roll_call)
        if self.end_record is not None:
            self.end_record()
        undo([*self.patches.values(), self.own])


def _connect(roster: Roster) -> None:
    """Send a first message before the program goes on. It alone needs the program's own client of the message
    store, which a call such as `new_group` holds until all ranks have come. If it takes longer than
    `PATIENCE`, the heart sends it as soon as it can."""

    def ask() -> None:
        roster.bounded().base().get(["first"])

    with suppress(HoldfastError):
        within(PATIENCE, "a first message", ask)


_current: _Installation | None = None


def install(
    framework: str | Iterable[str] | None = None,
    *,
    checkpoints: bool = True,
    huggingface: bool = True,
    guard: bool | Sequence[str] = True,
    warm_up: bool | Sequence[str] = True,
    session: bool = True,
    memory_budget: int | None = None,
    after_end: float | None = None,
    job: Job | None = None,
) -> None:
    """Let the frameworks of this process save, load and wait through Holdfast. Idempotent.

    Call it in every training process before the framework builds its workers. It imports no framework. A
    later call replaces the settings of an earlier one.

    framework: one name or several, such as `verl`: the names of the recipes in the documentation, and of what
        these frameworks use; default all that are imported now or later. The error for an unknown name lists
        the known ones.
    job: who takes part, deadlines, options (`holdfast.Job`). A save, a load or a wait inside one never fails
        sooner than the timeout of the process group. Ranks that do not take part may not save; a barrier on
        all ranks inside a guarded function waits for the participants only. By default these are the ranks
        of Megatron's groups, or all.
    after_end: seconds that a process may do nothing after the end of its main thread; then it is ended, with
        exit code 87. None: it is never ended; after the job's `report_after`, what keeps it alive is logged.
    checkpoints: replace saves and loads.
    huggingface: replace the functions that load published weights into a model, or save a model as published
        weights (mbridge, Megatron-Bridge, ms-swift's mcore-bridge; verl and NeMo RL call these).
    guard: inside the frameworks' functions that save, load and finalize, barriers wait, and ranks of other
        collectives meet, over the roster with these deadlines (`guarded`). A list of dotted names adds
        functions of your own; if one of them is never called, rank 0 logs it at the end.
    warm_up: `initialize_model_parallel` issues the first collectives of every group at its end, with these
        deadlines, and `memory_budget` bytes of GPU memory (`holdfast.warm_up`). A list names the operations.
    session: after `initialize_model_parallel`, to the end of the process, ranks watch each other, and groups
        are closed in order (`holdfast.session`).

    Raises BadInput for an unknown framework or function; then nothing is changed.
    """
    global _current
    # All arguments are checked before the present installation is undone.
    job = Job() if job is None else job_of(job)  # not that of an earlier install
    check_switches(checkpoints=checkpoints, huggingface=huggingface, session=session)
    if after_end is not None:
        check_seconds("after_end", after_end)
    settings = Settings(
        job,
        checkpoints=checkpoints,
        huggingface=huggingface,
        guard=bool(guard) or not isinstance(guard, bool),
        guarded=() if isinstance(guard, bool) else tuple(guard),
        warm_up=bool(warm_up),
        session=session,
        operations=None if isinstance(warm_up, bool) else chosen_operations(warm_up),
        memory_budget=memory_budget,
        after_end=after_end,
    )
    made = _Installation(settings, _frameworks(framework))
    _guards(settings)  # raises for a name that is no function, before anything is changed
    # Otherwise the new wrappers would wrap the old ones, whose deadlines would still apply.
    _undo()
    _current = made
    defaults.append(Job(report_after=job.report_after, lost_after=job.lost_after))
    made.begin()
    _warn_if_late(made)
    _warn_of_versions()
    if _sentences not in told_by_doctor:
        told_by_doctor.append(_sentences)
    made.serves = serve(facts)


def uninstall() -> None:
    """Put back what `install` replaced."""
    if _current is not None:
        _current.say_unreached()
    _undo()


def _undo() -> None:
    global _current
    if _current is not None:
        _current.end()
        defaults.pop()
        if _current.serves:
            stop()
        _current = None


def is_installed() -> bool:
    return _current is not None


def installed() -> list[InstalledFramework]:
    """List what is replaced and guarded in this process, by framework; empty without `install`."""
    if _current is None:
        return []
    reports = []
    for framework in _current.frameworks:
        patches = _current.patches[framework.name]
        # Leave out frameworks that are neither imported nor installed.
        if framework.package not in sys.modules and not version_of(framework.distribution):
            continue
        reports.append(
            InstalledFramework(
                framework.name,
                version_of(framework.distribution),
                tuple(str(done.replacement) for done in patches.done if done.replacement.part != "guard"),
                tuple(str(done.replacement) for done in patches.done if done.replacement.part == "guard"),
                tuple(patches.waiting),
                tuple(map(str, patches.missing)),
            )
        )
    return reports


def _sentences() -> tuple[str, ...]:
    """Describe the installation in lines for `holdfast doctor --pid`."""
    return tuple(
        f"{report.name} {report.version}".strip()
        + f": {len(report.replaced)} replaced, {len(report.guarded)} guarded, "
        f"{len(report.waiting)} modules not imported yet"
        + (f"; not there: {', '.join(report.missing)}" if report.missing else "")
        for report in installed()
    )


def _frameworks(wanted: str | Iterable[str] | None) -> list[Framework]:
    """Return the named frameworks and their dependencies among the known ones; all by default."""
    if wanted is None:
        return list(FRAMEWORKS)
    names = {wanted} if isinstance(wanted, str) else set(wanted)
    unknown = sorted(names - set(NAMES))
    if unknown:
        raise BadInput(
            f"framework={', '.join(unknown)} is not known.", hint=f"Give one of {', '.join(NAMES)}."
        )
    # A framework saves through other frameworks, whose save functions are the ones to replace.
    used = {other for known in FRAMEWORKS if known.name in names for other in known.uses}
    return [known for known in FRAMEWORKS if known.name in names | used]


def _guards(settings: Settings, reached: Callable[[str], None] = lambda place: None) -> list[Replacement]:
    """Make the replacements for the functions in `guard=[...]`. Raises BadInput if one does not exist."""
    return [guard_of(_find(place), settings, optional=False, reached=reached) for place in settings.guarded]


def _find(place: str) -> str:
    """Find a function by its dotted name; return its `module:qualified name`."""
    parts = place.split(".")
    # The longest module first; a method's module has fewer parts.
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            owner: object = import_module(module)
            break
        except ModuleNotFoundError as error:
            # The module exists, but something that it imports does not: the caller must see that.
            if error.name is None or not place.startswith(error.name):
                raise
    else:
        raise BadInput(f"guard={place!r} names no function of a module that can be imported.")
    for part in parts[cut:]:
        owner = getattr(owner, part, None)
    if not callable(owner):
        raise BadInput(f"guard={place!r} names no function.")
    return f"{module}:{'.'.join(parts[cut:])}"


@cache  # once in a process
def _warn_of_versions() -> None:
    """Warn of installed library versions with known hangs; on rank 0 only, as all ranks have the same."""
    variables = all_variables()
    if variables.get("RANK", "0") == "0":
        for known in affects(versions_here(), platform.machine(), variables):
            log.warning("A library of this job is known to hang: %s.", known)


def _warn_if_late(made: _Installation) -> None:
    """Warn if process groups exist already: they are neither warmed up nor watched."""
    state = sys.modules.get("megatron.core.parallel_state")
    asked = made.settings.warm_up or made.settings.session
    if asked and state is not None and state.model_parallel_is_initialized():
        log.warning(
            "install() came after megatron-core has made its process groups: they are not warmed up, and no "
            "session watches them. Call install() before initialize_model_parallel, or holdfast.warm_up() "
            "now."
        )
