"""Reads and shows the event logs and roll calls in a run folder: as an HTML page, as a trace, and live.
Nothing here imports torch."""
