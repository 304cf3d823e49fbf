"""Open, warm up and close process groups: all ranks together, each operation under one deadline."""
