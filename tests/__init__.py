"""The suite.

Settings for processes of pytest, and for all processes that import a part of the suite. Several run at once on few cores, so
torch computes on one thread in each, as in ranks under torchrun. The garbage collector runs less often: imports of torch and
frameworks make a million objects, none of which is garbage, and it takes an eighth of their time or more.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
THRESHOLD = gc.get_threshold()
gc.set_threshold(100_000, 20, 100)
