"""Views of a published model in the names and shapes of megatron-core or transformers.

`mapping` locates a tensor's elements in published tensors, `family` reads the tables in `families/`.
Neither imports torch. Imported by `maintenance` and `integrations`; a load gets a view by name, through
`io.open_checkpoint`.
"""
