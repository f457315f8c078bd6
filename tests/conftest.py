"""For all tests: what each needs, as markers; real Kafka and real Redis, each started once per run if a test asks."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# One kept place for compiled kernels, for this process and for all that tests start.
COMPILED_KERNELS = ROOT / ".cache" / "numba"
COMPILED_KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
os.environ.setdefault("NUMBA_CACHE_DIR", str(COMPILED_KERNELS))

# Helper modules assert too; their failures should show the values as well.
pytest.register_assert_rewrite(
    "tests.kernels", "tests.scheduler", "tests.service", "tests.sim", "tests.support"
)

pytest_plugins = ["tests.support.kafka", "tests.support.redis"]

# No deadlines: machines are shared, and time proves nothing. CI looks at the same examples every time, so that a
# failure there is the change's; runs by hand look at new ones.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

MARKER_OF_FIXTURE = {
    "kafka": "kafka",
    "redis_session_server": "redis",
    "any_redis_server": "redis",
    "tailrace": "process",
    "service": "process",
}
MARKER_OF_PLACE = {
    "tests/kernels/families": "model",
    "tests/kernels/test_determinism.py": "model",
    "tests/kernels/models/gpu": "interpreter",
    "tests/kernels/ops/gpu": "interpreter",
    "tests/kernels/runtime/gpu": "interpreter",
    "tests/kernels/sampling/gpu": "interpreter",
    "tests/kernels/test_determinism_gpu.py": "interpreter",
    "tests/kernels/tools/test_baseline.py": "model",
    "tests/kernels/models/cpu/test_precompile.py": "process",
    "tests/kernels/ops/cpu/test_product.py": "process",
    "tests/kernels/test_transformers_import.py": "process",
    "tests/service/grammar/test_validator.py": "process",
    "tests/service/cli": "process",
    "tests/service/embedded": "process",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses: nothing that needs a broker, a model or a process of its own can miss its marker."""
    moved = [place for place in MARKER_OF_PLACE if not (ROOT / place).exists()]
    if moved:
        raise pytest.UsageError(f"tests/conftest.py marks what is not there: {moved}")
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        names = {MARKER_OF_FIXTURE.get(name) for name in getattr(item, "fixturenames", ())}
        names |= {
            name for place, name in MARKER_OF_PLACE.items() if path == place or path.startswith(place + "/")
        }
        for name in names - {None}:
            item.add_marker(str(name))
