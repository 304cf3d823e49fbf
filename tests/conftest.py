from __future__ import annotations

import os

# Opening a TCPStore looks the peer's name up; a name server that drops a packet must cost a test
# one second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
