"""Conversion of checkpoints in other formats to Holdfast, and the folder that a conversion writes."""
