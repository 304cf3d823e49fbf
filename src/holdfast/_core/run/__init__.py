"""A training run: a folder of numbered steps that one job owns.

`checkpoints` is the public class; `folder` does its work; `owner` keeps two jobs apart; `preemption` stops
all ranks at one step. Imported by `integrations`.
"""
