"""What imports, exports and fetches need."""

import tests.frameworks.megatron.preload
import tests.system.test_conversions  # noqa: F401
