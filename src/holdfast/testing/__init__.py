"""Tools to test with, ours and users': worlds, clocks, faults, and the contracts of the seams."""
