"""The command line: one file a command, one library call each."""


def main() -> None:
    """Entry point of `holdfast`."""
