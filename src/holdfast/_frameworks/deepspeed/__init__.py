"""DeepSpeed's ZeRO checkpoints: import, and loading by an engine on another number of ranks."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "deepspeed",
    distribution="deepspeed",
    package="deepspeed",
    patches=f"{__name__}.engine",
    tested=("0.19.8",),
)
