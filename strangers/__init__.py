"""Other projects' own tests of checkpoints, run on stock and with one line changed: on Holdfast.

`python -m strangers` runs the tests of `projects.toml` twice from copies of these projects, prints a table,
and compares the differences with `expected.toml`. The copies are not part of this repository.
"""
