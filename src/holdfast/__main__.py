"""`python -m holdfast` is the command line."""

from holdfast._cli import main

main()
