"""The phases of a save, a load, a choice and a task, and the transitions between them. docs/protocol.md draws
them."""

from __future__ import annotations

Transitions = dict[str, dict[str, str]]

TRANSITIONS: Transitions = {
    "entered": {
        "assigning": "a rank holds tensors whose replicas nobody declared",
        "writing": "this rank knows what it writes",
        "failed": "an error on this rank, or an outcome `abandoned`",
    },
    "assigning": {
        "writing": "the committer said who writes them",
        "failed": "an error on this rank, or an outcome `abandoned`",
    },
    "writing": {
        "written": "this rank's files are durable",
        "failed": "an error on this rank, or an outcome `abandoned`",
    },
    "written": {
        "committing": "committer: every rank has written",
        "committed": "the committer put `final` in place",
        "unconfirmed": "agreed, but no `final` and no index by the deadline",
        "failed": "outcome `abandoned`",
    },
    # Only the committer enters this phase. The others stay in "written" until they know the end.
    "committing": {
        "committed": "the index is durable",
        "unconfirmed": "the index may or may not be durable",
        "failed": "headers disagree, shards leave a gap, or somebody abandoned first",
    },
    "committed": {},
    "failed": {},
    "unconfirmed": {},
}
"""A save on one rank: phase -> next phase -> why. docs/protocol.md draws this table."""

LOAD_TRANSITIONS: Transitions = {
    "entered": {"reading": "the committer named the checkpoint", "failed": "none there, or an error"},
    "reading": {"read": "all bytes verified and in place", "failed": "an error on this rank, or `abandoned`"},
    "read": {"loaded": "every rank has read", "failed": "outcome `abandoned`"},
    "loaded": {},
    "failed": {},
}


TASK_TRANSITIONS: Transitions = {
    "entered": {
        "acting": "the committer has heard all ranks, and answered",
        "failed": "an error, or `abandoned`",
    },
    "acting": {"acted": "this rank has done its part", "failed": "an error, or `abandoned`"},
    "acted": {"done": "every rank has done its part", "failed": "outcome `abandoned`"},
    "done": {},
    "failed": {},
}
"""A collective task (`core.task_steps`): open process groups, warm them up, close them."""

CHOICE_TRANSITIONS: Transitions = {
    "entered": {"chosen": "the committer named it", "failed": "an error, or `abandoned`"},
    "chosen": {},
    "failed": {},
}
