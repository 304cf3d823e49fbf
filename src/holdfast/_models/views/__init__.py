"""Other names and shapes of the same weights: a published model as megatron-core or transformers holds it.

`mapping` says where a tensor's elements lie in published tensors, `family` reads the tables in `families/`.
Neither imports torch. Imported by `maintenance` and `integrations`; a load gets a view by name, through
`io.open_checkpoint`.
"""
