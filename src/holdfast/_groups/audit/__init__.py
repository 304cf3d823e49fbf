"""Find what is known to end in a hang in the process groups and environment of a process.

`hazards`, `known` and `doctor` do not import torch.
"""
