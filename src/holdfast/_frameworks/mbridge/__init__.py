"""mbridge, by which verl loads and saves published weights (`vanilla_mbridge`)."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "mbridge",
    distribution="mbridge",
    package="mbridge",
    patches=f"{__name__}.patches",
    uses=("megatron-core",),
)
