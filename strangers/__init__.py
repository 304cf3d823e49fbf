"""Other projects' own tests, run on stock and with one line changed: on Holdfast.

`python -m strangers` runs PyTorch's tests of `torch.distributed.checkpoint` twice from a copy of PyTorch,
once as they are and once with their imports switched to `holdfast.dcp`, prints a table, and compares the
differences with `expected.toml`. The copy is not part of this repository.
"""
