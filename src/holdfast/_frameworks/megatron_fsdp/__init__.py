"""Megatron-FSDP's DTensors, with offsets that need no collective. Users import `holdfast.megatron_fsdp`.

megatron-core has a copy of Megatron-FSDP, so its description names the replacements (`patches`) as well.
"""
