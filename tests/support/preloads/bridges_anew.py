"""What verl and the bridges import; they themselves are imported by ranks, after `install()`."""

from tests.frameworks.verl.jobs import import_verl
from tests.support.preloads import bridges, forget  # noqa: F401 (imported for what it imports)

import_verl()
forget("verl", "mbridge", "megatron.bridge")
