from __future__ import annotations

import os

from hypothesis import settings

from tests.support.processes import PRELOAD

PRELOAD.append("tests.integrations.megatron.preload")  # before the first world starts the forkserver

# Opening a TCPStore looks the peer's name up; a name server that drops a packet must cost a test
# one second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Property tests: no time limit a case (the machine may be shared), no folder of found cases left behind, and
# the same cases in every run, so that a suite that passes passes again.
settings.register_profile("holdfast", deadline=None, database=None, derandomize=True)
settings.load_profile("holdfast")
