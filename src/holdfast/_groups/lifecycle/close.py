"""Closes process groups: on all ranks together, in reverse order, with a deadline; or on one rank alone,
immediately, after a failure.

`destroy_process_group` waits for the other ranks without bound. So it is called on a thread, and only after
all ranks have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from holdfast._core.base.threads import start_thread
from holdfast._core.base.values import Message
from holdfast._core.process.native_calls import native_call
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.torch_private import abort, known_groups
from holdfast._groups.lifecycle.device import Device
from holdfast.errors import GroupsFailed, HoldfastError

ABORT_TIME = 5.0
"""Seconds that the caller waits for groups to be aborted."""


class Closing(CollectiveTask):
    """Destroy groups in reverse order of creation, so that the default group, if included, comes last."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], call: Call) -> None:
        super().__init__("closing of process groups", "groups://close", call)
        self._groups = list(groups)
        self._device = Device()

    def execute(self, answer: Message) -> Message:
        # `execute` has its own thread, which starts on device 0.
        self._device.use()
        known = {id(entry.group): entry for entry in known_groups()}
        for number, group in enumerate(reversed(self._groups), 1):
            entry = known.get(id(group))
            if entry is None:
                continue  # it was destroyed by other code
            self.doing(f"destroying group {entry.description or entry.name}, {number} of {len(self._groups)}")
            try:
                dist.destroy_process_group(group)
            except Exception as error:
                raise GroupsFailed(
                    f"The group {entry.description or entry.name} could not be destroyed: {error}"
                ) from error
        return {}


def abort_all() -> None:
    """Abort all groups of this process in reverse order of creation, in bounded time, without other ranks."""

    def work() -> None:
        with suppress(RuntimeError), native_call():  # RuntimeError: the process is at its end
            for entry in reversed(known_groups()):
                abort(entry.group)

    # If no thread can be started, groups are not aborted (it might block): they end with the process.
    with suppress(HoldfastError):
        start_thread(work, "holdfast-abort").join(ABORT_TIME)
