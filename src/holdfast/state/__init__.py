"""Torch objects as tables of shards, and loaded values back into them.

Start at `flatten`: a user's nested state becomes named leaves, and leaves become rows of a `ShardTable`. The
other modules know one kind of value each. Imported by `saving`, `loading` and `integrations`; imports nothing
above `plan`.
"""
