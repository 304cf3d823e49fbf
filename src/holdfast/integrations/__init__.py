"""Holdfast in the calls of others: torch DCP, megatron-core, Megatron-FSDP, and their checkpoint formats.

Users import the thin modules `holdfast.dcp`, `holdfast.megatron` and `holdfast.megatron_fsdp`; nothing below
imports anything from here.
"""
