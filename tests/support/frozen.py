"""The last import of a forkserver: what it shares with its children stays out of their garbage collections, which
would copy it."""

import gc

gc.collect()
gc.freeze()
