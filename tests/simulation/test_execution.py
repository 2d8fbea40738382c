"""Tests for the engine: it ends with the process, says why it died, and stays small."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import psutil
import pytest
import tensorflow_federated as tff

from simulation import execution

PROGRAM = textwrap.dedent("""
    import os, signal, sys
    from simulation import process
    tff = process.import_quietly("tensorflow_federated")
    import numpy as np
    from simulation import execution

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def add(values):
        return tff.federated_sum(values)

    def main():
        place = execution.set_execution_context(execution.Engine.TFF).device
        print(place, flush=True)
        print(add([1, 2, 3]), add([]), flush=True)
        print(*process._find_children(), flush=True)
        for size in range(50):
            assert add([1] * size) == size
        (worker,) = process._find_children()
        print(len(execution._close.__self__._executors), flush=True)
        print("killing", file=sys.stderr, flush=True)
        os.kill(worker, signal.SIGKILL)
        add([1] * 99)

    process.run_program(main, name="program", argv=sys.argv)
""")


def test_one_life_of_the_engine():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            name: value
            for name, value in os.environ.items()
            if name != "TF_CPP_MIN_LOG_LEVEL"
        },
    )
    device, sums, worker, kept = run.stdout.splitlines()
    assert device.startswith(f"CPU, {os.cpu_count()} cores")
    assert sums == "6 0"
    assert not psutil.pid_exists(int(worker))
    # Fifty cohort sizes, and what is kept is bounded.
    assert int(kept) <= 2
    assert run.returncode == 1
    # Start-up, without the variable that the tests set, and 52 calls say nothing.
    assert run.stderr.startswith("killing\n")
    assert "helper process ended with code -9 (out of memory?)" in run.stderr


@pytest.mark.parametrize("engine", execution.Engine)
@pytest.mark.parametrize("limit", [0, -3])
def test_a_bad_limit_is_refused(engine, limit):
    with pytest.raises(ValueError, match="`max_concurrent_clients` must be >= 1"):
        execution.set_execution_context(engine, max_concurrent_clients=limit)


@pytest.mark.parametrize("engine", execution.Engine)
def test_a_gpu_that_is_not_there_is_refused(engine):
    with pytest.raises(execution.EngineError, match="gpu:7"):
        execution.set_execution_context(engine, device="gpu:7")


def test_a_device_of_no_kind_is_refused():
    with pytest.raises(ValueError, match="`device` must be"):
        execution.set_execution_context(device="tpu")


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def add(values):
    return tff.federated_sum(values)


def get_current():
    return tff.framework.get_context_stack().current


class TestBlocks:
    @pytest.fixture(autouse=True)
    def leave_the_context(self):
        yield
        execution.set_execution_context()

    def test_the_former_context_comes_back_and_works(self):
        execution.set_execution_context()
        before = get_current()
        with execution.use_execution_context(max_concurrent_clients=1) as outer:
            assert get_current() is not before
            assert outer.engine is execution.Engine.LOCAL
            with execution.use_execution_context():
                assert add([1, 2]) == 3
                # One that is set inside ends with the block.
                execution.set_execution_context(max_concurrent_clients=3)
                assert add([1, 2]) == 3
            assert get_current() is outer._context
            assert add([1, 2]) == 3
        assert get_current() is before
        assert add([1, 2]) == 3

    def test_an_engine_that_does_not_start_leaves_the_one_in_use(self):
        execution.set_execution_context()
        before = get_current()
        with pytest.raises(execution.EngineError):
            execution.set_execution_context(device="gpu:9")
        with pytest.raises(execution.EngineError, match="no Ray cluster answers"):
            execution.set_execution_context(
                execution.Engine.RAY, ray_address="127.0.0.1:1"
            )
        with (
            pytest.raises(execution.EngineError),
            execution.use_execution_context(device="gpu:9"),
        ):
            pass
        assert get_current() is before
        assert add([1, 2]) == 3

    def test_an_address_without_ray_is_refused(self):
        with pytest.raises(ValueError, match="`ray_address` must be None without"):
            execution.set_execution_context(ray_address="127.0.0.1:1")
