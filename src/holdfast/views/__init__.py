"""Other names and shapes of the same weights: a published model as megatron-core or transformers holds it.

`mapping` says where a tensor's elements lie in published tensors, `family` reads the tables in `families/`.
No torch, and no I/O except reading the tables. Used by `loading`, import and export.
"""
