"""DeepSpeed's ZeRO checkpoints: imported, and loaded by an engine on another number of ranks."""
