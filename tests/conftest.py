"""Eight virtual CPU devices, and hypothesis settings that give the same examples each time."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis

hypothesis.settings.register_profile(
    "laws",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("LAW_EXAMPLES", 15)),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("laws")
