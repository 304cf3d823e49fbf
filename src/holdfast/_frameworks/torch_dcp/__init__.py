"""torch.distributed.checkpoint: the same calls without collectives, its arguments, formats and readers.

Users import `holdfast.dcp`. `patches` replaces its functions inside frameworks' own saves and loads.
"""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "torch-dcp",
    distribution="torch",
    package="torch.distributed.checkpoint",
    patches=f"{__name__}.patches",
)
