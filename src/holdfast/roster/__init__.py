"""A coordination store: who is there, and short messages between ranks, over the store of torch.distributed
or in memory.

Anything that passes `holdfast.testing.RosterContract` can take its place.
"""
