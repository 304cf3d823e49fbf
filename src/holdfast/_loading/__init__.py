"""A load, from a committed checkpoint into a user's state, in place and in any layout.

`job` is the load of one rank from begin to end; `lazy_state` creates what the state does not have yet;
`offset_exchange` computes offsets that depend on the local lengths of all ranks. Imported by `run`,
`maintenance` and `integrations`.
"""
