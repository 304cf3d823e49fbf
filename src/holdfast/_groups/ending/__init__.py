"""The end of this process: the SystemExit that ends the program, and a limit on the time after that."""
