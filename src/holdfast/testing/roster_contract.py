"""A contract test for rosters: subclass it, add a `world` fixture, and run it with pytest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from holdfast._core.base.values import Message
from holdfast._core.roster.base import Roster


class RosterContract:
    """Override the fixture `world`: a function that takes a world size and returns one roster per rank."""

    @pytest.fixture
    def world(self) -> Callable[[int], list[Roster]]:
        raise NotImplementedError("override the fixture `world`")

    def test_ranks_know_who_they_are(self, world: Callable[[int], list[Roster]]) -> None:
        rosters = world(3)
        assert [roster.rank for roster in rosters] == [0, 1, 2]
        assert {roster.world_size for roster in rosters} == {3}
        assert rosters[2].bounded().rank == 2
        assert (
            len({roster.job() for roster in (*rosters, rosters[1].lane("beside"), rosters[1].bounded())}) == 1
        )

    def test_what_one_puts_all_get(self, world: Callable[[int], list[Roster]]) -> None:
        first, second = world(2)
        message: Message = {"text": "ü/..", "numbers": [1, 2.5, None, True], "nested": {"a": {}}}
        first.put("key/with/slashes", message)
        assert second.wait("key/with/slashes", 5.0)
        assert second.get(["key/with/slashes", "nothing"]) == [message, None]
        assert second.bounded().get(["key/with/slashes"]) == [message]
        first.put("key/with/slashes", {"now": 2})
        assert first.get(["key/with/slashes"]) == [{"now": 2}]

    def test_get_never_waits(self, world: Callable[[int], list[Roster]]) -> None:
        (roster,) = world(1)
        begun = time.monotonic()
        assert roster.get(["a", "b"]) == [None, None]
        assert roster.get([]) == []
        assert time.monotonic() - begun < 0.5

    def test_wait_is_bounded_and_wakes(self, world: Callable[[int], list[Roster]]) -> None:
        first, second = world(2)
        begun = time.monotonic()
        assert not first.wait("never", 0.2)
        # Not early either: the protocol's pauses would become a busy loop.
        assert 0.15 < time.monotonic() - begun < 1.0
        timer = threading.Timer(0.2, lambda: second.put("soon", {}))
        timer.start()
        begun = time.monotonic()
        assert first.wait("soon", 10.0)
        assert time.monotonic() - begun < 2.0
        timer.join()

    def test_of_many_claims_one_stands(self, world: Callable[[int], list[Roster]]) -> None:
        rosters = world(6)
        # Ten turns, because a race is lost only now and then.
        for turn in range(10):
            # All at once, or the first would claim before the others begin.
            start = threading.Barrier(len(rosters))
            outcomes: list[Message] = []

            def claim(roster: Roster, turn: int = turn, start: threading.Barrier = start) -> None:
                start.wait(10)
                outcomes.append(roster.claim(f"outcome/{turn}", {"rank": roster.rank}))  # noqa: B023

            threads = [threading.Thread(target=claim, args=(roster,)) for roster in rosters]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert len(outcomes) == len(rosters)
            assert all(message == outcomes[0] for message in outcomes)
            assert rosters[0].get([f"outcome/{turn}"]) == [outcomes[0]]

    def test_counters_count_over_all_ranks(self, world: Callable[[int], list[Roster]]) -> None:
        first, second = world(2)
        assert [first.count("n"), second.count("n"), second.lane("beside").count("n"), first.count("n")] == [
            1,
            2,
            1,
            3,
        ]
        # A deleted counter begins at 1 again: the last rank that leaves a call deletes its counters.
        first.delete(["n"])
        assert second.count("n") == 1

    def test_deleted_keys_are_gone_and_may_be_claimed_anew(
        self, world: Callable[[int], list[Roster]]
    ) -> None:
        first, second = world(2)
        first.put("a", {"x": 1})
        first.delete(["a", "never there"])
        assert second.get(["a"]) == [None]
        assert second.claim("a", {"x": 2}) == {"x": 2}

    def test_a_lane_has_messages_of_its_own(self, world: Callable[[int], list[Roster]]) -> None:
        first, second = world(2)
        first.put("a", {"x": 1})
        assert first.lane("beside") is first.lane("beside")
        assert second.lane("beside").rank == 1
        assert second.lane("beside").get(["a"]) == [None]
        first.lane("beside").put("a", {"x": 2})
        assert second.lane("beside").wait("a", 5.0)
        assert second.lane("beside").get(["a"]) == second.lane("beside").bounded().get(["a"]) == [{"x": 2}]
        assert second.lane("other").get(["a"]) == [None]
        assert second.get(["a"]) == [{"x": 1}]

    def test_a_lane_knows_the_roster_outside_of_all_lanes(self, world: Callable[[int], list[Roster]]) -> None:
        (roster,) = world(1)
        inner = roster.lane("a").lane("b")
        assert inner.base() is roster.base() is roster.lane("c").base()
        inner.base().put("k", {"x": 1})
        assert roster.get(["k"]) == inner.base().bounded().get(["k"]) == [{"x": 1}]
        assert inner.get(["k"]) == [None]

    def test_a_roster_tells_where_its_store_is(self, world: Callable[[int], list[Roster]]) -> None:
        (roster,) = world(1)
        assert isinstance(roster.serves(), bool)
        assert all(isinstance(address, str) for address in roster.way())
