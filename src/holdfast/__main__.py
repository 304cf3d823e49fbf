"""`python -m holdfast` is the command line."""

from holdfast._tools.cli import main

main()
