"""Python runs this at the start of every process of a suite, also of those that tests start.

STRANGERS_GPUS: so many GPUs are there, and are the CPU (`strangers.cpu`); on both sides alike.
STRANGERS_STAND_INS: for these names, modules are stand-ins (`strangers.stand_ins`); on both sides, too.
STRANGERS_FOLDER: the moments at which Holdfast has committed a save or completed a load go to files there.
"""

import os

import wrapt

_GPUS, _FOLDER = os.environ.get("STRANGERS_GPUS", "0"), os.environ.get("STRANGERS_FOLDER")
_STAND_INS = os.environ.get("STRANGERS_STAND_INS", "")
_COUNTED = ("save.committed", "load.loaded")
"""A call that was entered, failed or refused is none of them: it is no evidence of a save."""


def _gpus(_: object) -> None:
    from strangers.cpu import stand_in_for_gpus

    stand_in_for_gpus(int(_GPUS))


def _accelerators(_: object) -> None:
    from strangers.cpu import stand_in_for_accelerators

    stand_in_for_accelerators()


def _stand_in(_: object) -> None:
    from strangers.stand_ins import stand_in

    stand_in(_STAND_INS.split(","))


def _write_moments(_: object) -> None:
    from holdfast.events import Event, subscribe

    def write(event: Event) -> None:
        if event.name in _COUNTED:
            with open(f"{_FOLDER}/{os.getpid()}.moments", "a") as file:
                file.write(f"{event.at}\n")

    subscribe(write)


if _GPUS != "0":
    wrapt.register_post_import_hook(_gpus, "torch")
    wrapt.register_post_import_hook(_accelerators, "torch.testing._internal.common_distributed")
if _STAND_INS:
    wrapt.register_post_import_hook(_stand_in, "torch")
if _FOLDER:
    wrapt.register_post_import_hook(_write_moments, "holdfast.events")
