"""What imports, exports and fetches need."""

import tests.integrations.megatron.preload
import tests.system.test_conversions  # noqa: F401
