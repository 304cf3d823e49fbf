"""Processes whose last save in the background fails: nobody is to take their exit code for a success."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.groups.session.launch import launch

pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("ends", 1),
        ("is impatient", 1),
        ("exits", 1),
        ("raises", 1),
        ("is interrupted", 130),
        ("asks", 0),
        ("asks a future", 0),
        ("catches", 0),
        ("warns", 0),
    ],
)
def test_a_last_save_that_failed_is_the_end_of_a_process_that_has_not_asked(
    how: str, code: int, tmp_path: Path
) -> None:
    ended = launch(how, tmp_path, "save in vain", world=1)
    assert ended.codes == [code], ended.said
    said = ended.said.rstrip().splitlines()
    assert said.count("a handler from before") == said.count("a handler from after") == 1, ended.said
    if how == "is interrupted":
        assert "was not committed yet: Ctrl-C at the end of the process" in said[-1]
    elif code:
        assert said.index("a handler from before") == len(said) - 3, ended.said
        assert "nobody had asked how it ended" in said[-2]
        assert said[-1].startswith("holdfast.errors.StorageError: save of "), ended.said
        assert ("ValueError: the loss is not a number" in ended.said) == (how == "raises")
    else:
        assert ("A save in the background failed" in ended.said) == (how == "warns")
        assert "nobody had asked" not in ended.said
