"""Hosts in one machine: namespaces of network and of processes, joined by a switch whose cables can be pulled.

    with Hosts(3) as hosts:
        process = hosts.start(1, [sys.executable, "-m", "tests.roster.rank_on_host", ...])
        hosts.pull(1); hosts.plug(1); hosts.close_between(0, 1); hosts.refuse_between(0, 1)

Needs root, or what stands for it; `reason_not` says why it does not work here.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from holdfast._core.roster.process import children_of
from tests.support.waiting import wait_until


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


REFUSES = "10.99.0.254"
"""The switch itself; it refuses every connection that is sent over it."""


@cache
def reason_not() -> str:
    """Say why there can be no hosts here; "" if there can."""
    try:
        with Hosts(1) as hosts:
            hosts.start(0, ["true"]).communicate(timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {getattr(error, 'stderr', '') or error}"
    return ""


class Hosts:
    """So many hosts; see the module."""

    _made = 0

    def __init__(self, count: int) -> None:
        Hosts._made += 1
        self._prefix = f"holdfast-{os.getpid()}-{Hosts._made}-"
        self._count = count
        self._started: list[subprocess.Popen[str]] = []

    def name(self, host: int | str) -> str:
        return f"{self._prefix}{host}"

    def address(self, host: int) -> str:
        return f"10.99.0.{host + 1}"

    def __enter__(self) -> Hosts:
        switch = self.name("switch")
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            for device in ("lo", "bridge"):
                _ip("-n", switch, "link", "set", device, "up")
            _ip("-n", switch, "address", "add", f"{REFUSES}/24", "dev", "bridge")
            # It takes the addresses of hosts (`refuse_between`), but is not to be asked for them.
            quiet = "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore"
            _ip("netns", "exec", switch, "sh", "-c", quiet)
            for host in range(self._count):
                name = self.name(host)
                _ip("netns", "add", name)
                _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", f"p{host}", "netns", switch)
                _ip("-n", switch, "link", "set", f"p{host}", "master", "bridge", "up")
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", switch, "address", "add", f"{self.address(host)}/32", "dev", "lo")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise
        return self

    def start(self, host: int, command: list[str], **environment: str) -> subprocess.Popen[str]:
        """Start a program on a host, with pids and a /proc of that host's own."""
        whole = ["ip", "netns", "exec", self.name(host)]
        whole += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "slave"]
        whole += command
        made = subprocess.Popen(
            whole,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(made)
        return made

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to the program itself."""
        wait_until(lambda: children_of(process.pid))
        os.kill(children_of(process.pid)[0], number)

    def pull(self, host: int) -> None:
        """Cut a host off."""
        _ip("-n", self.name("switch"), "link", "set", f"p{host}", "down")

    def plug(self, host: int) -> None:
        _ip("-n", self.name("switch"), "link", "set", f"p{host}", "up")

    def close_between(self, one: int, other: int) -> None:
        """Let two hosts reach all others, but not each other: what they send is dropped."""
        self.close_way(one, other)
        self.close_way(other, one)

    def close_way(self, one: int, other: int) -> None:
        """Lose what one host sends to another."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.name(one), "neighbour", "replace", self.address(other), *nobody)

    def open_way(self, one: int, other: int) -> None:
        _ip("-n", self.name(one), "neighbour", "delete", self.address(other), "dev", "eth0")

    def refuse_between(self, one: int, other: int) -> None:
        """Let two hosts reach all others, but not each other: a firewall between them resets what is open,
        and refuses what is new."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.name(here), "route", "replace", f"{self.address(there)}/32", "via", REFUSES)

    def accept_between(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.name(here), "route", "delete", f"{self.address(there)}/32")

    def close(self) -> None:
        for process in self._started:
            process.kill()  # and with it, by --kill-child, the program
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()
        for host in ("switch", *range(self._count)):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self.name(host))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
