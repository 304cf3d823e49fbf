"""`install()`: the frameworks' own save and load functions call Holdfast, with no other change.

verl, Megatron-LM, Megatron-Bridge, NeMo RL and ms-swift all save through `megatron.core.dist_checkpointing`,
so that is what is replaced; their own functions around it get deadlines and names for what they wait for
(`frameworks`). A framework that is not imported yet is changed when it is. `uninstall()` puts back what was
there. Nothing is replaced by importing Holdfast.
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
    """What `install` did to one framework in this process."""

    name: str
    version: str
    """Of the installed distribution; empty if there is none."""
    replaced: tuple[str, ...]
    guarded: tuple[str, ...]
    waiting: tuple[str, ...]
    """Modules that are not imported yet; they are changed when they are."""
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
        """Did it begin to answer `holdfast doctor`?"""

    def begin(self) -> None:
        for framework in self.frameworks:
            self.patches[framework.name].begin(replacements_of(framework, self.settings))
        self.own.begin(_guards(self.settings))

    def end(self) -> None:
        # The other way round: one replacement may stand on another, as a guard on a replaced save.
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

    Call it in every training process before the framework builds its workers; nothing is imported for it.
    The last call holds.

    framework: one name or several of `megatron-core`, `torch-dcp`, `megatron-lm`, `megatron-bridge`, `verl`,
        `nemo-rl`, `mbridge`, `ms-swift`, `mcore-bridge`, `torchtitan`; default all that are imported now or
        later.
    timeout: seconds until a save, a load or a wait inside one fails.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    participants: ranks that train: numbers, a process group, or a function that gives ranks when it is asked.
        Other ranks may not save. A barrier on all ranks inside a guarded function means these. Default all.
    checkpoints: replace saves and loads.
    huggingface: replace what loads published weights into a model and saves a model as such (mbridge,
        Megatron-Bridge, ms-swift's mcore-bridge; verl and NeMo RL call these).
    guard: inside the frameworks' functions that save, load and finalize, barriers, object collectives and
        tensor collectives wait over the roster with these deadlines (`guarded`). A list of dotted names adds
        functions of your own.
    warm_up: `initialize_model_parallel` issues the first collectives of every group at its end, with these
        deadlines, `operations` and `memory_budget` bytes of GPU memory (`holdfast.warm_up`).
    session: from there to the end of the process ranks watch each other, and groups are closed in order
        (`holdfast.session`).
    host_memory_budget: bytes of host memory on this rank that copies of asynchronous saves may take together.
    nearest_rng: a load takes a rank's state of random generators from the nearest rank, where the layout that
        saved had no such rank.

    Raises BadInput for a framework or a function that it does not know; then nothing has changed.
    """
    global _current
    # All arguments are checked before the installation that holds now is taken back.
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
    _guards(settings)  # a name that is none changes nothing
    # Replacements of two calls would stand on each other, the older deadlines inside.
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
    """Has this process called `install`, and not `uninstall`?"""
    return _current is not None


def installed() -> list[InstalledFramework]:
    """What is replaced and guarded in this process, framework by framework; empty without `install`."""
    if _current is None:
        return []
    found = []
    for framework in _current.frameworks:
        patches = _current.patches[framework.name]
        # Of a framework that is not there at all nothing is worth a line.
        if framework.package not in sys.modules and not version_of(framework.distribution):
            continue
        found.append(
            InstalledFramework(
                framework.name,
                version_of(framework.distribution),
                tuple(str(done.replacement) for done in patches.done if done.replacement.part != "guard"),
                tuple(str(done.replacement) for done in patches.done if done.replacement.part == "guard"),
                tuple(patches.waiting),
                tuple(map(str, patches.missing)),
            )
        )
    return found


def _sentences() -> tuple[str, ...]:
    """What `holdfast doctor --pid` shows of this."""
    return tuple(
        f"{found.name} {found.version}".strip()
        + f": {len(found.replaced)} replaced, {len(found.guarded)} guarded, {len(found.waiting)} modules not "
        f"imported yet" + (f"; not there: {', '.join(found.missing)}" if found.missing else "")
        for found in installed()
    )


def _frameworks(wanted: str | Iterable[str] | None) -> list[Framework]:
    """Those named, with what they use; all by default."""
    if wanted is None:
        return list(FRAMEWORKS)
    names = {wanted} if isinstance(wanted, str) else set(wanted)
    unknown = sorted(names - set(NAMES))
    if unknown:
        raise BadInput(
            f"framework={', '.join(unknown)} is not known.", hint=f"Give one of {', '.join(NAMES)}."
        )
    # A framework saves through others, whose save is what is replaced.
    used = {other for known in FRAMEWORKS if known.name in names for other in known.uses}
    return [known for known in FRAMEWORKS if known.name in names | used]


def _guards(settings: Settings) -> list[Replacement]:
    """The functions that the caller wants guarded, which must be there."""
    return [guard_of(_find(place), settings, optional=False) for place in settings.guarded]


def _find(place: str) -> str:
    """`module:qualified name` of a dotted name."""
    parts = place.split(".")
    # The longest module first: a class's method has a module with fewer parts in front of it.
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            owner: object = import_module(module)
            break
        except ModuleNotFoundError as error:
            # The module is there, and imports something that is not: the caller is to hear that.
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
    """Groups that are there already are neither warmed up nor watched."""
    state = sys.modules.get("megatron.core.parallel_state")
    asked = made.settings.warm_up or made.settings.session
    if asked and state is not None and state.model_parallel_is_initialized():
        log.warning(
            "install() came after megatron-core has made its process groups: they are not warmed up, and no "
            "session watches them. Call install() before initialize_model_parallel, or holdfast.warm_up() "
            "now."
        )
