"""The writer of torchtune's checkpointer, which asks for a file for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

from holdfast._frameworks.guard import is_guarded
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


def replacements(settings: Settings) -> Iterator[Replacement]:
    place = "torchtune.training.checkpointing._checkpointer"
    yield Replacement(place, "FileSystemWriter", "checkpoints", _for_holdfast, imported=True)


def _for_holdfast(original: Callable[..., object]) -> Callable[..., object]:
    """Make the writer of a guarded save without `single_file_per_rank`: Holdfast has files of its own, and
    would leave a save with this argument to torch DCP."""

    @wraps(original)
    def writer(*args: object, **named: object) -> object:
        if is_guarded():
            named.pop("single_file_per_rank", None)
        return original(*args, **named)

    return writer
