"""What a run has recorded, read back and shown: the event logs and roll calls of its folder, as a page, as a
trace, and while it runs. Nothing here imports torch."""
