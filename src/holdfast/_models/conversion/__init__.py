"""Checkpoints of other formats to checkpoints of Holdfast, and the folder that a conversion writes."""
