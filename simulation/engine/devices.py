"""Which devices the clients' work is placed on."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from simulation.engine.errors import EngineError


def select_devices(device: str) -> list[str]:
    """Returns TensorFlow's names of the devices that share the clients.

    Args:
        device: "auto" (all GPUs where there are any, else the CPU), "cpu", or
            "gpu:<number>".

    Raises:
        EngineError: If the device is not there.
        ValueError: If the name is none of these.
    """
    gpus = [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU")]
    if device == "auto":
        return gpus or cpus
    if device == "cpu":
        return cpus
    kind, _, number = device.partition(":")
    if kind != "gpu" or not number.isdigit():
        raise ValueError(
            f"`device` must be 'auto', 'cpu' or 'gpu:<number>'. Found {device!r}."
        )
    if int(number) >= len(gpus):
        raise EngineError(
            f"`device` is {device!r}, but TensorFlow sees {len(gpus)} GPUs here; use "
            "--device=auto or cpu"
        )
    return [gpus[int(number)]]


def give_clients_the_cores() -> None:
    """Runs each op on one thread, where many clients keep the cores busy anyway.

    Without effect once TensorFlow is in use, or where there are GPUs.
    """
    if tf.config.list_physical_devices("GPU"):
        return
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(1)


def keep_sums_in_order() -> None:
    """Adds up in the order that the graphs say.

    TensorFlow's arithmetic optimizer merges sums of three and more tensors into one op,
    which begins with whichever of them lies in a buffer that nobody else needs any
    longer: with several threads, the same inputs can give other last digits.
    """
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def describe_devices(names: Sequence[str]) -> str:
    """Returns the devices in a word or two, for people."""
    return ", ".join(name.removeprefix("/device:") for name in names)
