"""Training in several processes: the result of one, and an end where a process is missing."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # several processes

SCRIPT = Path(__file__).parents[2] / "examples" / "multi_process.py"
LONGEST = 120  # seconds


@pytest.fixture
def start():
    """Starts the script in a group of its own, which does not outlive the test."""
    started = []

    def run(*arguments, devices=2):
        count = f"--xla_force_host_platform_device_count={devices}"
        process = subprocess.Popen(
            [sys.executable, "-u", SCRIPT, *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": count},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process):
    """Its exit status and what it said; subprocess.TimeoutExpired if it hangs."""
    out, _ = process.communicate(timeout=LONGEST)
    return process.returncode, out


@pytest.fixture
def coordinator():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def parameters(out):
    return [
        np.concatenate([np.frombuffer(bytes.fromhex(x), np.float32) for x in line.split()])
        for line in re.findall(r"parameters ([0-9a-f ]+)", out)
    ]


def losses(out):
    return [float(loss) for loss in re.findall(r"\[0\] window \d+: loss (\d+\.\d+)", out)]


def test_two_processes_of_two_devices_train_as_one_of_four(start, coordinator):
    status, out = finish(start("--coordinator", coordinator))
    assert status == 0, out
    first, second = parameters(out)
    np.testing.assert_array_equal(first, second)
    single = start("--num-processes", 1, "--process-id", 0, devices=4)
    status, single_out = finish(single)
    assert status == 0, single_out
    (want,) = parameters(single_out)
    np.testing.assert_allclose(first, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(losses(out), losses(single_out), rtol=1e-4)
    assert len(losses(out)) == 20
    assert losses(out)[-1] < losses(out)[0] / 10


def wait_for(process, text):
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return
    raise AssertionError(seen)


def test_a_process_that_dies_in_mid_window_ends_the_other_and_is_named(start, coordinator):
    options = ["--coordinator", coordinator, "--num-processes", 2, "--timeout", 10, "--pause", 0.1]
    survivor, victim = (start(*options, "--process-id", i) for i in range(2))
    wait_for(survivor, "window 2")
    time.sleep(0.15)  # a window takes four pauses of 0.1 s
    victim.kill()
    status, out = finish(survivor)
    assert status != 0
    assert re.search(r"tasks are unhealthy.*\s1\s", out), out


def test_the_launcher_names_the_process_that_was_lost(start, coordinator):
    launcher = start("--coordinator", coordinator, "--pause", 0.1)
    wait_for(launcher, "window 2")
    children = subprocess.run(
        ["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[1]), signal.SIGKILL)
    status, out = finish(launcher)
    assert status == 1
    assert "process 1 was lost: exit status -9" in out


def test_too_few_processes_name_the_count(start, coordinator):
    options = ["--coordinator", coordinator, "--num-processes", 4, "--timeout", 8]
    both = [start(*options, "--process-id", i) for i in range(2)]
    for process in both:
        status, out = finish(process)
        assert status == 1
        assert f"fewer than --num-processes=4 processes came to {coordinator}" in out


def test_a_number_that_no_process_has_is_named(start, coordinator):
    began = time.monotonic()
    process = start("--coordinator", coordinator, "--num-processes", 2, "--process-id", 5)
    status, out = finish(process)
    assert status == 1
    assert "process_id=5, num_processes=2" in out
    assert time.monotonic() - began < 30  # not the timeout of 40


def test_processes_that_do_not_divide_the_rows_are_refused(start):
    status, out = finish(start("--num-processes", 3))
    assert status == 2
    assert "argument --num-processes: must divide 8 rows, got 3" in out
