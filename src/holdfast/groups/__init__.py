"""Process groups: opened early and together, warmed up under a deadline, closed in order, aborted after a
failure.

`lifecycle` opens, warms up and closes groups; `session` spans them from begin to end and bounds how the
process ends; `audit` names what is known to end in a hang. Imported by `integrations` and `cli`.
"""
