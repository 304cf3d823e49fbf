"""Boxes of global tensors, grids of ranks, and checks that boxes cover a tensor. Pure arithmetic."""
