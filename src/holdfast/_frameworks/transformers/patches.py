"""The Trainer's choice of the checkpoint to resume from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import wraps

from holdfast._core.base.reporting import warn_once
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


def replacements(settings: Settings) -> Iterator[Replacement]:
    yield Replacement(
        "transformers.trainer_utils", "get_last_checkpoint", "checkpoints", _last, optional=True
    )


def _last(original: Callable[..., object]) -> Callable[..., object]:
    """Make a `get_last_checkpoint` that skips incomplete checkpoints.

    Trainer writes `trainer_state.json` last, and can't resume without it.
    """

    @wraps(original)
    def get_last_checkpoint(folder: str) -> object:
        newest = original(folder)
        steps = [int(found[1]) for name in os.listdir(folder) if (found := _STEP.fullmatch(name))]
        for step in sorted(steps, reverse=True):
            path = os.path.join(folder, f"checkpoint-{step}")
            if os.path.exists(os.path.join(path, "trainer_state.json")):
                if path != newest:
                    warn_once(
                        f"{newest} is incomplete: it has no trainer_state.json. {path} is taken instead."
                    )
                return path
        return newest

    return get_last_checkpoint


_STEP = re.compile(r"checkpoint-(\d+)")
