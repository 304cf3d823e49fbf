"""What the command line does with checkpoints that are there: look, compare, verify, rebuild, sweep.

One module a task, one process, no torch. Imported by `cli` only.
"""
