"""python -m strangers [--pytorch FOLDER] [--suite FILE ...]

Exits 1 if the differences between stock and Holdfast are not those of expected.toml.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from strangers.run import Ended, run_suite
from strangers.switch import FOLDER, callers, copy_tests

SUITES = (
    "test_checkpoint.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_tp_checkpoint.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_hsdp_checkpoint.py",
    "test_save_load_api.py",
    "test_nested_dict.py",
    "test_state_dict.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_hf_storage.py",
    "test_hf_safetensor_e2e.py",
    "test_planner.py",
    "test_format_utils.py",
    "test_compatibility.py",
    "e2e/test_e2e_save_and_load.py",
)
VARIABLE = "PYTORCH"
HOW = f"""\
Give a copy of PyTorch of the installed release by --pytorch or {VARIABLE}; for example:
  git clone --depth 1 --filter=blob:none --sparse --branch v2.13.0 https://github.com/pytorch/pytorch
  git -C pytorch sparse-checkout set {FOLDER}"""
Results = dict[str, Ended]


def main(words: list[str] | None = None) -> int:
    """Run the suites on both sides, print the table, compare; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m strangers",
        description="PyTorch's tests of its checkpoints, on stock and on Holdfast.",
    )
    parser.add_argument(
        "--pytorch", type=Path, default=os.environ.get(VARIABLE), help=f"a copy of PyTorch (${VARIABLE})"
    )
    parser.add_argument("--suite", nargs="+", metavar="FILE", help=", ".join(SUITES))
    parser.add_argument("--expected", type=Path, default=Path(__file__).with_name("expected.toml"))
    args = parser.parse_args(words)
    folder = Path(args.pytorch or "")
    if args.pytorch is None or not (folder / FOLDER).is_dir():
        print(f"{args.pytorch or 'No folder was given; it'} has no {FOLDER}. {HOW}", file=sys.stderr)
        return 2
    suites = tuple(args.suite or SUITES)
    missing = [name for name in suites if not (folder / FOLDER / name).is_file()]
    if missing and args.suite:
        parser.error(f"{', '.join(missing)} is not in {folder / FOLDER}")
    for name in missing:
        print(f"{name}: not in this copy of PyTorch")
    suites = tuple(name for name in suites if name not in missing)
    reasons = {one["test"]: one["reason"] for one in tomllib.loads(args.expected.read_text())["difference"]}
    stock, ours, counted = Results(), Results(), set[str]()
    with tempfile.TemporaryDirectory() as work:
        sides = {side: Path(work, side) for side in ("stock", "ours")}
        for side, into in sides.items():
            copy_tests(folder, suites, into, ours=side == "ours")
        print(HEAD)
        for suite in suites:
            found = run_suite(sides["stock"], suite)
            stock |= found
            ours |= run_suite(sides["ours"], suite, [test for test in found if found[test].how == "passed"])
            calling = callers(folder / FOLDER / suite)
            counted |= {
                test for test in stock if any(test.split("::")[2].startswith(name) for name in calling)
            }
            print(row(suite, stock, ours, counted, reasons), flush=True)
    return conclude(stock, ours, counted, reasons)


def differences(stock: Results, ours: Results) -> dict[str, str]:
    """Return the tests that stock passes and Holdfast does not, with what went wrong."""
    lost = Ended("failed", "it did not run")
    ends = {test: ours.get(test, lost) for test, end in stock.items() if end.how == "passed"}
    return {test: end.why for test, end in ends.items() if end.how != "passed"}


def row(suite: str, stock: Results, ours: Results, counted: set[str], reasons: Mapping[str, str]) -> str:
    """Return a suite's line of the table, and its differences."""
    mine = {test: end for test, end in stock.items() if test.startswith(f"{suite}::")}
    passed = {test for test, end in mine.items() if end.how == "passed"}
    differ = differences(mine, ours)
    most = counted & passed
    here = f"{len(passed):5} {len(passed) - len(differ):5} {len(most):9} {len(most - differ.keys()):5}"
    lines = [f"{suite:38} {here} {len(mine) - len(passed):8}"]
    for test, why in differ.items():
        lines.append(f"    {test.partition('::')[2]}: {reasons.get(test, f'NOT EXPECTED: {why}')}")
    return "\n".join(lines)


HEAD = f"{'':38} {'all':>11} {'to a checkpoint':>15} {'not here':>8}\n{'':38} stock  ours     stock  ours"


def conclude(stock: Results, ours: Results, counted: set[str], reasons: Mapping[str, str]) -> int:
    """Print the sums and what is not as expected; return the exit status."""
    differ = differences(stock, ours)
    passed = {test for test, end in stock.items() if end.how == "passed"}
    most = counted & passed
    print(f"\nOf {len(passed)} tests that stock passes, {len(passed) - len(differ)} pass on holdfast.dcp;")
    print(f"of the {len(most)} among them that go to a checkpoint, {len(most - differ.keys())}.")
    stale = [test for test in reasons if test in passed and test not in differ]
    for test, why in differ.items():
        if test not in reasons:
            print(f"Not expected to differ: {test}: {why}")
    for test in stale:
        print(f"Expected to differ, and does not: {test}")
    return 1 if stale or differ.keys() - reasons.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
