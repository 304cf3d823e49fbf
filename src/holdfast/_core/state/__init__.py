"""Torch objects as tables of shards, and loaded values back into them.

Start at `flatten`: a user's nested state becomes named leaves, and leaves become rows of a `ShardTable`. Each
of the other modules handles one kind of value. Imported by `saving`, `loading` and `integrations`; imports
nothing above `plan`.
"""
