"""`install()` in a process of `holdfast run`, with the arguments that its environment names."""

from __future__ import annotations

from holdfast._core.base.options import Options, read_install
from holdfast._core.protocol.job import Job
from holdfast._frameworks.install import install, is_installed


def install_from_environment() -> None:
    """Call `install` with the arguments in HOLDFAST_INSTALL; nothing without it, or if the program did."""
    arguments = read_install()
    if arguments is not None and not is_installed():
        job = dict(arguments.pop("job", {}))
        install(**arguments, job=Job(**{**job, "options": Options(**job.get("options", {}))}))
