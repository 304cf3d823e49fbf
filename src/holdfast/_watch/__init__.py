"""Diagnosis of hangs: collects evidence about the ranks of a job, and applies rules to it.

`evidence`, the readers and the rules don't import torch: `holdfast diagnose` needs only a log.
"""
