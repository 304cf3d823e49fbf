"""Whole checkpoints from and to other formats, on one process, in streaming."""
