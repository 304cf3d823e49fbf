"""Closing process groups: all ranks together, in reverse order, under a deadline; or at once and alone, after
a failure.

`destroy_process_group` waits for the other ranks without bound, so it is only called when all of them have
said that they are here, and on a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from holdfast.errors import GroupsFailed, HoldfastError
from holdfast.groups.lifecycle.device import Device
from holdfast.native_calls import native_call
from holdfast.protocol.call import Call
from holdfast.protocol.task import CollectiveTask
from holdfast.threads import start_thread
from holdfast.torch_private import abort, known_groups
from holdfast.values import Message

ABORT_TIME = 5.0
"""Seconds that aborting groups may take before the process goes on without."""


class Closing(CollectiveTask):
    """Destroy groups, the last made first; the default group at the end, if it is among them."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], call: Call) -> None:
        super().__init__("closing of process groups", "groups://close", call)
        self._groups = list(groups)
        self._device = Device()

    def execute(self, answer: Message) -> Message:
        # `execute` has its own thread, which starts on device 0.
        self._device.use()
        known = {id(found.group): found for found in known_groups()}
        for number, group in enumerate(reversed(self._groups), 1):
            found = known.get(id(group))
            if found is None:
                continue  # destroyed by somebody else
            self.doing(f"destroying group {found.description or found.name}, {number} of {len(self._groups)}")
            try:
                dist.destroy_process_group(group)
            except Exception as error:
                raise GroupsFailed(
                    f"The group {found.description or found.name} could not be destroyed: {error}"
                ) from error
        return {}


def abort_all() -> None:
    """End what all groups of this process are doing, the last made first; asks nobody, and does not wait for
    long."""

    def work() -> None:
        with suppress(RuntimeError), native_call():  # at the end of the process there is nothing to abort
            for found in reversed(known_groups()):
                abort(found.group)

    with suppress(HoldfastError):  # without a thread nobody could bound it; groups end with the process then
        start_thread(work, "holdfast-abort").join(ABORT_TIME)
