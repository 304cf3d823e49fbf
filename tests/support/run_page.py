"""Runs the program in the file of its first argument, as torchrun does; for `tests.groups.session.launch.Forks`."""

import os
import runpy
import sys

if __name__ == "__main__":
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
