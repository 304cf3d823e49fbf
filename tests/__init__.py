"""The suite.

What is set here, for processes of pytest and for all that import a part of the suite, costs a core less time: several
processes run at once. Torch computes on one thread in each (as in ranks under torchrun), because a thread that waits for
another of its process, which has no core, spins. The garbage collector comes less often: imports of torch and of
frameworks make a million objects, none of which is garbage.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
THRESHOLD = gc.get_threshold()
gc.set_threshold(100_000, 20, 100)
