"""Holdfast behind the APIs of torch DCP, megatron-core and Megatron-FSDP, and their checkpoint formats.

Users import the thin modules `holdfast.dcp`, `holdfast.megatron` and `holdfast.megatron_fsdp`; nothing below
imports anything from here.
"""
