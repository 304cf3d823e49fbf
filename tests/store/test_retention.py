"""Which steps stay: the pure choice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.store.retention import Retention, StepFacts, facts_of, retention_of
from holdfast.errors import BadInput

RULES = st.builds(
    lambda keep, most, every, best: Retention(
        keep=keep, keep_every=every, best=best and "loss", best_mode=best, keep_best=most if best else 1
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 6), st.integers(1, 900).map(lambda s: timedelta(seconds=s))),
    st.sampled_from([None, "min", "max"]),
)


@st.composite
def runs(draw: st.DrawFn) -> list[StepFacts]:
    """The steps of a run in the order of their saves; each is later than the one before."""
    found, now = [], 1e9
    for step in sorted(draw(st.sets(st.integers(0, 60), max_size=25))):
        now += draw(st.integers(1, 400))
        created = draw(st.sampled_from([now, now, now, None]))
        value = draw(st.one_of(st.none(), st.integers(-3, 3).map(float)))
        metrics = draw(st.sampled_from([{"loss": value}, {"loss": value}, {}, None]))
        partial = draw(st.sampled_from([False, False, True, None]))
        found.append(StepFacts(step, created, metrics, partial=partial))
    return found


@settings(max_examples=300, deadline=None)
@given(RULES, runs())
def test_the_newest_the_best_and_the_unknown_stay_and_the_rest_go(
    rules: Retention, steps: list[StepFacts]
) -> None:
    kept = rules.kept(steps)
    assert rules.keep is not None
    assert {facts.step for facts in steps[-rules.keep :]} <= kept.keys() <= {facts.step for facts in steps}
    values = {
        facts.step: facts.metrics["loss"]
        for facts in steps
        if facts.metrics and facts.metrics.get("loss") is not None
    }
    if rules.best and values:
        choose = min if rules.best_mode == "min" else max
        best = choose(values.values())
        assert rules.best_step(steps) == max(step for step, value in values.items() if value == best)
        assert rules.best_step(steps) in kept
        sign = 1 if rules.best_mode == "min" else -1
        ranking = sorted(values, key=lambda step: (sign * values[step], -step))
        assert kept.keys() >= set(ranking[: rules.keep_best])
        for step in ranking[rules.keep_best :]:
            assert "best" not in kept.get(step, "")
    timed = isinstance(rules.keep_every, timedelta)
    for facts in steps:
        unknown = (rules.best and facts.metrics is None) or (timed and facts.created is None)
        if unknown or rules.stays_by_number(facts.step):
            assert facts.step in kept
        assert (facts.step in kept) == bool(kept.get(facts.step))
    whole = [facts.step for facts in steps if facts.partial is False]
    assert kept.keys() >= set(whole[-rules.keep :])
    may_be = [facts.step for facts in steps if facts.partial is None]
    if len(whole) < rules.keep:
        assert kept.keys() >= set(may_be)
    if not rules.best and rules.keep_every is None:
        unknown = [step for step in may_be if len(whole) < rules.keep or step > whole[-rules.keep]]
        assert kept.keys() == {
            *(facts.step for facts in steps[-rules.keep :]),
            *whole[-rules.keep :],
            *unknown,
        }


@settings(max_examples=300, deadline=None)
@given(RULES, runs())
def test_a_choice_after_every_save_is_the_choice_over_all_of_them(
    rules: Retention, steps: list[StepFacts]
) -> None:
    """Steps that are gone change nothing: but what was the best once, and is not any more, is gone."""
    left: list[StepFacts] = []
    for facts in steps:
        left.append(facts)
        kept = rules.kept(left)
        left = [one for one in left if one.step in kept]
    assert [facts.step for facts in left] == list(rules.kept(steps))


def test_one_step_in_every_so_much_time_stays() -> None:
    rules = Retention(keep=1, keep_every=timedelta(minutes=10))
    steps = [StepFacts(step, 1e9 + 240 * step, partial=False) for step in range(10)]
    assert list(rules.kept(steps)) == [0, 3, 6, 9]
    assert rules.kept(steps)[9] == "one of the newest 1, every 0:10:00"


def test_a_clock_that_was_ahead_and_was_set_back_does_not_end_the_rule() -> None:
    rules = Retention(keep=1, keep_every=timedelta(minutes=10))
    ahead = [StepFacts(step, 2e9 + 240 * step, partial=False) for step in range(4)]
    steps = ahead + [StepFacts(step, 1e9 + 240 * step, partial=False) for step in range(4, 12)]
    assert list(rules.kept(steps)) == [0, 3, 4, 7, 10, 11]


def test_every_step_stays_without_keep() -> None:
    rules = Retention(best="acc", best_mode="max")
    steps = [StepFacts(1, 1.0, {"acc": 0.5}), StepFacts(2, 2.0, {"acc": 0.4})]
    assert list(rules.kept(steps)) == [1, 2]
    assert rules.best_step(steps) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep": 0}, "keep must be at least 1"),
        ({"keep": True}, "keep must be at least 1"),
        ({"keep": 1, "keep_every": 0}, "keep_every must be a number of steps from 1 on"),
        ({"keep": 1, "keep_every": 2.5}, "keep_every must be a number of steps from 1 on"),
        ({"keep": 1, "keep_every": timedelta(0)}, "or a datetime.timedelta above 0"),
        ({"keep_every": 5}, "without keep= all of them stay"),
        ({"best": "loss"}, "needs best_mode='min' or 'max'"),
        ({"best": "loss", "best_mode": "low"}, "needs best_mode='min' or 'max'"),
        ({"best": 3, "best_mode": "min"}, "best must be the name of a metric"),
        ({"best_mode": "min"}, "needs best="),
        ({"keep": 1, "keep_best": 2}, "needs best="),
        ({"best": "loss", "best_mode": "min", "keep_best": 2}, "without keep= all steps stay"),
        ({"keep": 1, "best": "loss", "best_mode": "min", "keep_best": 0}, "keep_best must be a number of"),
        ({"keep": 1, "best": "loss", "best_mode": "min", "keep_best": True}, "keep_best must be a number of"),
    ],
)
def test_rules_that_are_none_are_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        Retention(**given)
    assert words in caught.value.message
    assert caught.value.message.count(". ") == 0


def test_metrics_are_numbers_of_any_kind() -> None:
    rules = Retention(best="loss", best_mode="min")
    given = {"loss": torch.tensor(1.5), "acc": np.float32(0.5), "n": 3, "bad": float("nan")}
    assert rules.checked(given) == {"loss": 1.5, "acc": 0.5, "n": 3.0, "bad": None}
    for wrong, words in (
        ({"acc": 1.0}, "metrics has no 'loss', by which best= chooses; it has acc."),
        ({"loss": "low"}, "metrics must be names with numbers"),
        ({"loss": torch.zeros(2)}, "metrics must be names with numbers"),
        ({"loss": 10**400}, "metrics must be names with numbers"),
        ([1.0], "metrics must be names with numbers"),
    ):
        with pytest.raises(BadInput) as caught:
            rules.checked(wrong)  # type: ignore[arg-type]
        assert words in caught.value.message


@pytest.mark.parametrize(
    "rules",
    [
        Retention(keep=3),
        Retention(keep=3, keep_every=1000, best="loss", best_mode="min"),
        Retention(keep=3, best="loss", best_mode="min", keep_best=5),
        Retention(keep=1, keep_every=timedelta(hours=1.5)),
    ],
)
def test_rules_come_back_from_an_index(rules: Retention) -> None:
    assert retention_of(rules.describe()) == rules


@pytest.mark.parametrize(
    "described",
    [None, [], {"keep": "many"}, {"keep": 1, "keep_every": "soon"}, {"keep": 1, "keep_every": "1e99 s"}],
)
def test_rules_that_make_no_sense_are_none(described: object) -> None:
    assert retention_of(described) is None


def test_an_index_is_not_trusted() -> None:
    assert facts_of(1, {"created": "now", "metrics": 3, "partial": 1}) == StepFacts(1)
    assert facts_of(1, {"created": 5, "metrics": {"loss": "low"}}) == StepFacts(
        1, 5.0, {"loss": "low"}, partial=False
    )
    assert facts_of(1, {"created": 10**400, "partial": True}) == StepFacts(1, None, {}, partial=True)
    rules = Retention(keep=1, best="loss", best_mode="min")
    strange = [
        StepFacts(1, 1.0, {"loss": "low"}),
        StepFacts(2, 2.0, {"loss": [1]}),
        StepFacts(3, 3.0, {"loss": 10**400}),
    ]
    assert rules.best_step(strange) is None
