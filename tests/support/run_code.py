"""Runs the program in its first argument, as `python -c` does; for `tests.groups.session.launch.Forks`."""

import sys

if __name__ == "__main__":
    _, program, *sys.argv[1:] = sys.argv
    exec(program)
