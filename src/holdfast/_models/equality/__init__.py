"""Proofs that weights are the same, whatever layout, format or dtype they are stored in."""
