"""mcore-bridge, by which ms-swift loads and saves published weights."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "mcore-bridge",
    distribution="mcore-bridge",
    package="mcore_bridge",
    patches=f"{__name__}.patches",
    uses=("megatron-core",),
)
