"""A save, from a user's state to a committed checkpoint.

`job` is the complete save of one rank, `commit` the part of the committer. (The package is not called `save`,
because `holdfast.save` is the function.) Imported by `background`, `run`, `maintenance`
and `integrations`.
"""
