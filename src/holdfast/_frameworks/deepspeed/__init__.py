"""DeepSpeed's ZeRO checkpoints: import, and loading by an engine on another number of ranks."""
