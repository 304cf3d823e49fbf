"""`install()` makes the frameworks' own save and load functions call Holdfast, without changes to their code.

verl, Megatron-LM, Megatron-Bridge, NeMo RL and ms-swift all save through `megatron.core.dist_checkpointing`,
so its functions are replaced. The frameworks' own functions around it are guarded: their waits get
deadlines, and errors name the missing rank (`frameworks`). A framework that is not imported yet is changed at
its import. `uninstall()` puts the originals back. Importing Holdfast replaces nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module

from holdfast.deadline import check_seconds
from holdfast.errors import BadInput
from holdfast.groups.audit.doctor import serve, stop
from holdfast.groups.lifecycle.state import facts
from holdfast.groups.lifecycle.state import installed as told_by_doctor
from holdfast.integrations.frameworks import FRAMEWORKS, NAMES, Framework, guard_of, replacements_of
from holdfast.integrations.patching import Patches, Replacement
from holdfast.integrations.settings import Participants, Settings
from holdfast.integrations.versions import version_of
from holdfast.protocol.call import check_arguments

log = logging.getLogger("holdfast")


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
    """What is installed in this process."""

    def __init__(self, settings: Settings, frameworks: list[Framework]) -> None:
        self.settings = settings
        self.frameworks = frameworks
        self.patches = {framework.name: Patches() for framework in frameworks}
        self.own = Patches()
        """Guards that the caller named."""
        self.serves = False
        """Did it start to answer `holdfast doctor`?"""

    def begin(self) -> None:
        for framework in self.frameworks:
            self.patches[framework.name].begin(replacements_of(framework, self.settings))
        self.own.begin(_guards(self.settings))

    def end(self) -> None:
        # In reverse order, because one replacement may wrap another, as a guard wraps a replaced save.
        for patches in reversed([*self.patches.values(), self.own]):
            patches.undo()


_current: _Installation | None = None


def install(
    framework: str | Iterable[str] | None = None,
    *,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    participants: Participants = None,
    checkpoints: bool = True,
    huggingface: bool = True,
    guard: bool | Sequence[str] = True,
    warm_up: bool = True,
    session: bool = True,
    operations: Sequence[str] | None = None,
    memory_budget: int | None = None,
    host_memory_budget: int | None = None,
    nearest_rng: bool = False,
) -> None:
    """Let the frameworks of this process save, load and wait through Holdfast. Idempotent.

    Call it in every training process before the framework builds its workers. It imports no framework. A
    later call replaces the settings of an earlier one.

    framework: one name or several of `megatron-core`, `torch-dcp`, `megatron-lm`, `megatron-bridge`, `verl`,
        `nemo-rl`, `mbridge`, `ms-swift`, `mcore-bridge`, `torchtitan`; default all that are imported now or
        later.
    timeout: seconds until a save, a load or a wait inside one fails.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    participants: ranks that train: numbers, a process group, or a function that returns the ranks at each
        call. Other ranks may not save. A barrier on all ranks inside a guarded function waits for these.
        Default all.
    checkpoints: replace saves and loads.
    huggingface: replace the functions that load published weights into a model, or save a model as published
        weights (mbridge, Megatron-Bridge, ms-swift's mcore-bridge; verl and NeMo RL call these).
    guard: inside the frameworks' functions that save, load and finalize, barriers, object collectives and
        tensor collectives wait over the roster with these deadlines (`guarded`). A list of dotted names adds
        functions of your own.
    warm_up: `initialize_model_parallel` issues the first collectives of every group at its end, with these
        deadlines, `operations` and `memory_budget` bytes of GPU memory (`holdfast.warm_up`).
    session: after `initialize_model_parallel`, to the end of the process, ranks watch each other, and groups
        are closed in order (`holdfast.session`).
    host_memory_budget: bytes of host memory on this rank that copies of asynchronous saves may take together.
    nearest_rng: where the layout that saved had no rank at this rank's place, a load takes the state of
        random generators from the nearest rank.

    Raises BadInput for an unknown framework or function; then nothing is changed.
    """
    global _current
    # All arguments are checked before the present installation is undone.
    check_seconds("timeout", timeout)
    check_seconds("stall_timeout", stall_timeout)
    check_arguments(host_memory_budget=host_memory_budget)
    settings = Settings(
        timeout=timeout,
        stall_timeout=stall_timeout,
        participants=participants,
        checkpoints=checkpoints,
        huggingface=huggingface,
        guard=bool(guard) or not isinstance(guard, bool),
        guarded=() if isinstance(guard, bool) else tuple(guard),
        warm_up=warm_up,
        session=session,
        operations=None if operations is None else tuple(operations),
        memory_budget=memory_budget,
        host_memory_budget=host_memory_budget,
        nearest_rng=nearest_rng,
    )
    made = _Installation(settings, _frameworks(framework))
    _guards(settings)  # raises for a name that is no function, before anything is changed
    # Otherwise the new replacements would wrap the old ones, and the old deadlines would hold inside.
    uninstall()
    _current = made
    made.begin()
    _warn_if_late(made)
    if _sentences not in told_by_doctor:
        told_by_doctor.append(_sentences)
    made.serves = serve(facts)


def uninstall() -> None:
    """Put back what `install` replaced."""
    global _current
    if _current is not None:
        _current.end()
        if _current.serves:
            stop()
        _current = None


def is_installed() -> bool:
    """Return whether this process has called `install`, and not `uninstall` since."""
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
    """Return the named frameworks and those that they use; all by default."""
    if wanted is None:
        return list(FRAMEWORKS)
    names = {wanted} if isinstance(wanted, str) else set(wanted)
    unknown = sorted(names - set(NAMES))
    if unknown:
        raise BadInput(
            f"framework={', '.join(unknown)} is not known.", hint=f"Give one of {', '.join(NAMES)}."
        )
    # A framework saves through others, and it is their save that is replaced.
    used = {other for known in FRAMEWORKS if known.name in names for other in known.uses}
    return [known for known in FRAMEWORKS if known.name in names | used]


def _guards(settings: Settings) -> list[Replacement]:
    """Make guards for the functions that the caller named, which must exist."""
    return [guard_of(_find(place), settings, optional=False) for place in settings.guarded]


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
