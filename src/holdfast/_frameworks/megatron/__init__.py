"""megatron-core's checkpoint functions without a collective, and what `install()` replaces in it.

Users import `holdfast.megatron`. `mcore` has every name of megatron-core that Holdfast uses.
"""
