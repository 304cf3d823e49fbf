"""Process groups: opened early and together, warmed up under a deadline, closed in order, aborted after a
failure.

`lifecycle` opens, warms up and closes groups. `session` does all of it around a program, and bounds the time
in which the process ends. `audit` names what is known to end in a hang. Imported by `integrations` and `cli`.
"""
