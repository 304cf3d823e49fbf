"""One profile for all property tests: no time limit a case (the machine may be shared), no files left."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("holdfast", deadline=None, database=None)
settings.load_profile("holdfast")
