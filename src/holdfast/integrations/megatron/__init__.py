"""megatron-core's checkpoint calls without a collective, and `install()`, which puts them where frameworks
call.

Users import `holdfast.megatron`. Every name of megatron-core that is used stands in `mcore`.
"""
