"""A save, from a user's state to a committed checkpoint.

`job` is the save of one rank from begin to end, `commit` the part of the committer. (The room is not called
`save`, because `holdfast.save` is the function.) Imported by `background`, `run`, `maintenance`
and `integrations`.
"""
