"""How long the files of a run took: what `--durations` says of single tests, summed up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

FILES = 20


def slowest_files(reports: Iterable[pytest.TestReport], least: float) -> Iterator[str]:
    """Yield a line for each of the slowest files that took `least` seconds or more, and one for the sum of all files."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        name = report.nodeid.partition("::")[0]
        seconds[name] += report.duration  # of setup, call and teardown
        tests[name].add(report.nodeid)
    for name in sorted(seconds, key=lambda name: -seconds[name])[:FILES]:
        if seconds[name] >= least:
            yield f"{seconds[name]:8.2f}s {len(tests[name]):5} tests  {name}"
    yield f"{sum(seconds.values()):8.2f}s {sum(map(len, tests.values())):5} tests  in {len(seconds)} files"
