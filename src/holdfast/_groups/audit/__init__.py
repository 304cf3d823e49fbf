"""Find known causes of hangs in the process groups and environment of a process.

`hazards`, `known` and `doctor` do not import torch.
"""
