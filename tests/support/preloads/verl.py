"""verl's manager, as it can be imported without a GPU, and forgotten again: it is what `install()` waits for."""

from tests.frameworks.verl.jobs import import_verl
from tests.support.preloads import forget

import_verl()
forget("verl")
