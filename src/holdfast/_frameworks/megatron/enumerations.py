"""megatron-core's enumerations, for code that also runs where megatron-core is not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from holdfast._core.format.torch_objects import Allowed


def if_installed() -> tuple[Allowed, ...]:
    """Return the enumerations, which common state may contain; none if megatron-core is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of CUDA extensions that are missing
        try:
            safe_types = _import()
        except ImportError:
            return ()
    return safe_types()


def if_imported() -> tuple[Allowed, ...]:
    """Return the enumerations, which its `args` contain; none if the program has not imported it."""
    return _import()() if "megatron.core" in sys.modules else ()


def _import() -> Callable[[], tuple[Allowed, ...]]:
    from holdfast._frameworks.megatron.mcore import safe_types

    return safe_types
