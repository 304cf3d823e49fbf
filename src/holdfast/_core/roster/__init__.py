"""A coordination store: the ranks, and short messages between them, over the store of torch.distributed or in
memory.

Any class that passes `holdfast.testing.RosterContract` can take its place.
"""
