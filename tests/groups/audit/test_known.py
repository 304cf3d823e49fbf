"""Versions that are known to hang are told once, and only where they are."""

from __future__ import annotations

import datetime
import logging
import re
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

import holdfast
from holdfast._frameworks import install
from holdfast._groups.audit import known
from holdfast._groups.audit.known import affects, redirecting_bridges, table
from holdfast._tools.cli import cli, doctor


@pytest.mark.parametrize(
    ("version", "machine", "has"),
    [("2.28.9", "aarch64", True), ("2.29.2", "aarch64", True), ("2.29.3", "aarch64", False), ("2.30.7+cuda13.0", "aarch64", False),
     ("2.28.9", "x86_64", False), ("", "aarch64", False)],
)  # fmt: skip
def test_an_entry_concerns_its_versions_and_machine(version: str, machine: str, has: bool) -> None:
    found = affects({"nccl": version}, machine, {})
    assert any(entry.machine == "aarch64" for entry in found) == has


def test_an_entry_concerns_its_variables() -> None:
    pxn = {"NCCL_PXN_DISABLE": "1"}
    assert [entry.fixed for entry in affects({"nccl": "2.30.4"}, "x86_64", pxn)] == ["2.32"]
    assert not affects({"nccl": "2.30.4"}, "x86_64", {})
    assert not affects({"nccl": "2.32.2"}, "x86_64", pxn)
    assert affects({"torch": "2.7.0"}, "x86_64", {})
    assert not affects({"torch": "2.7.0"}, "x86_64", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"})


def test_every_entry_has_a_thread_a_day_and_a_range() -> None:
    for entry in table():
        assert entry.thread.startswith("https://github.com/")
        assert datetime.date.fromisoformat(entry.noted) <= datetime.date.today() + datetime.timedelta(
            days=366
        )
        assert entry.fixed
        assert not entry.has(entry.fixed)
        for pattern in entry.variables.values():
            re.compile(pattern)


@pytest.fixture
def bad_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "version", {"torch": "2.7.0"}.__getitem__)
    monkeypatch.setattr(known, "PackageNotFoundError", KeyError)
    monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)


def test_doctor_tells(bad_torch: None) -> None:
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert "known to hang: after init_process_group" in result.stdout
    assert "https://github.com/pytorch/pytorch/issues/153960" in result.stdout


def test_install_warns_once_and_on_one_rank(
    bad_torch: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(rank: str) -> int:
        monkeypatch.setenv("RANK", rank)
        install._warn_of_versions.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "holdfast"):
            for _ in range(2):
                holdfast.install("torch-dcp")
                holdfast.uninstall()
        return caplog.text.count("is known to hang")

    assert warnings("1") == 0
    assert warnings("0") == 1
    install._warn_of_versions.cache_clear()


def device(folder: Path, name: str, kind: str, vendor: str, *capabilities: tuple[int, int]) -> None:
    """A PCI device as sysfs has it; an extended capability has an id, and what its word at 6 says."""
    config, at = bytearray(4096), 0x100
    for number, (one, control) in enumerate(capabilities, 1):
        onward = 0x100 + number * 0x40 if number < len(capabilities) else 0
        struct.pack_into("<IHH", config, at, onward << 20 | 1 << 16 | one, 0x5F, control)
        at = onward
    (folder / name).mkdir(parents=True)
    (folder / name / "class").write_text(f"{kind}\n")
    (folder / name / "vendor").write_text(f"{vendor}\n")
    (folder / name / "config").write_bytes(config)


@pytest.mark.parametrize(
    ("control", "gpus", "bridges"),
    [
        (0x001D, 2, ["0000:00:03.1"]),  # as in nccl 2079
        (0x0001, 2, []),  # the source is checked, and nothing is sent elsewhere
        (0x0000, 2, []),
        (0x001D, 1, []),
    ],
)
def test_bridges_that_send_what_gpus_send_through_the_iommu(
    control: int, gpus: int, bridges: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(tmp_path, "0000:00:00.0", "0x060000", "0x1022")
    device(tmp_path, "0000:00:03.1", "0x060400", "0x1022", (0x0001, 0xFFFF), (0x000D, control))
    for number in range(gpus):
        device(tmp_path, f"0000:{41 + number}:00.0", "0x030000", "0x10de")
    assert redirecting_bridges(tmp_path) == bridges
    monkeypatch.setattr(doctor, "redirecting_bridges", lambda: bridges)
    told = CliRunner().invoke(cli, ["doctor"]).stdout
    assert ("1 PCI bridge (0000:00:03.1) have" in told) == bool(bridges)


def test_bridges_of_this_machine_are_read_or_none_is_told(tmp_path: Path) -> None:
    assert isinstance(redirecting_bridges(), list)
    assert redirecting_bridges(tmp_path / "none") == []
    device(tmp_path, "0000:00:01.0", "0x060400", "0x1022")
    (tmp_path / "0000:00:01.0" / "config").write_bytes(b"\xff" * 64)  # all that a user gets
    assert redirecting_bridges(tmp_path) == []
