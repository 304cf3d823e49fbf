"""What in a process's groups and environment is known to end in a hang. `hazards` and `doctor` import no
torch."""
