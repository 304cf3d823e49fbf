"""Runnable examples for Holdfast."""
