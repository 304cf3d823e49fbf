"""Holdfast behind the APIs of torch DCP, megatron-core, Megatron-FSDP, and training frameworks.

Each framework has a folder here; its `__init__.py` says which of its functions `install` replaces and guards.
What all share is beside the folders. `huggingface` has what several bridges share. Users import the thin
modules `holdfast.dcp`, `holdfast.megatron` and `holdfast.megatron_fsdp`; nothing below imports anything from
here.
"""
