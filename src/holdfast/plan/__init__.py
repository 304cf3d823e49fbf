"""Who writes what, and who reads what from where: tables in, tables out. No I/O, no torch, no O(n^2) over
chunks."""
