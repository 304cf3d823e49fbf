"""Other names and shapes of the same weights: a published model as megatron-core or transformers holds it.

`mapping` says where a tensor's elements lie in published ones, `family` reads the tables in `families/`. No
torch, no I/O but that of the tables. Used by `loading` and by those who import and export.
"""
