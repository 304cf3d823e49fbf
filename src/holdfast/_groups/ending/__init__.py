"""How this process ends: by which SystemExit, and for how long it may stay after that."""
