"""megatron-core's checkpoint functions without a collective, and what `install()` replaces in it.

Users import `holdfast.megatron`. `mcore` has every name of megatron-core that Holdfast uses.
"""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "megatron-core",
    distribution="megatron-core",
    package="megatron.core",
    guards=(
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.maybe_finalize_async_calls",
    ),
    patches=f"{__name__}.patches",
    tested=("0.16.1", "0.19.2"),
)
