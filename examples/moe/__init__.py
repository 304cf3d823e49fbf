"""The training side of the demo: a small mixture-of-experts model with FSDP2 and expert parallelism."""
