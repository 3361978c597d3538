"""Eight virtual CPU devices, the same examples each time, and what test modules share."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import pytest

# The same examples in each run. To try many others, and print how to reproduce a failure:
# LAW_EXAMPLES=400 python -m pytest --hypothesis-profile=nightly tests/core/test_laws.py
hypothesis.settings.register_profile(
    "laws",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("LAW_EXAMPLES", 15)),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "nightly", hypothesis.settings.get_profile("laws"), derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("laws")


@pytest.fixture(scope="module")
def compile_quickly():
    """XLA's quickest compiler, for tests of what an example does and not of its speed."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
