"""A load, from a committed checkpoint into a user's state, in place and in any layout.

`job` is the complete load of one rank; `lazy_state` creates values that the state does not have yet;
`offset_exchange` computes offsets that depend on the local lengths of all ranks. Imported by `run`,
`maintenance` and `integrations`.
"""
