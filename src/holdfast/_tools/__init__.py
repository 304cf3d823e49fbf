"""The command line, and everything that works on existing checkpoints and on recorded runs."""
