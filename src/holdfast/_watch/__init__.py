"""What hangs, where and why: evidence of a job's ranks is collected, and rules make a diagnosis of it.

Nothing in `evidence`, the readers and the rules imports torch: `holdfast diagnose` runs where only a log is.
"""
