"""Fixtures of all tests: real Kafka and real Redis, each started once per run and only when a test asks for it."""

import os

import pytest
from hypothesis import settings

# Helper modules assert too; their failures should show the values as well.
pytest.register_assert_rewrite("tests.kernels", "tests.scheduler", "tests.service", "tests.support")

pytest_plugins = ["tests.support.kafka", "tests.support.redis"]

# No deadlines: machines are shared, and time proves nothing. CI looks at the same examples every time, so that a
# failure there is the change's; runs by hand look at new ones.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")
