"""Boxes of global tensors, grids of ranks, and whether boxes cover a tensor. Pure arithmetic."""
