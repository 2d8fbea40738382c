"""Speed of a peer: rounds of federated averaging in FedJAX.

  python -m benchmarks.peer_fedjax DATA.npz
  python benchmarks/peer_fedjax.py DATA.npz  # with any interpreter that has the peer

It needs `pip install fedjax==0.0.17 jax==0.4.38 jaxlib==0.4.38` and no other module of
this repository; JAX 0.6 and later lack a function that FedJAX 0.0.17 calls. DATA.npz
holds `x` (float32 [clients, batches, batch_size, 28, 28, 1]), `y` (int32 [clients,
batches, batch_size]), `model` ("cnn" or "linear"), `num_classes`, `learning_rate` and
`repeats`. The last line of stdout is a JSON object: `system`, `seconds` of each repeat
after one warm-up round, and `first_seconds`, which is building and the warm-up round
with its compilation, without starting Python and importing. The exit status is 3 where
a package is missing.

What is timed is FedJAX's own `fed_avg.federated_averaging`, which weighs clients by
their numbers of examples: equal ones here. All cores are used in the way that was the
fastest of FedJAX's for each model, 20 clients x 100 examples on 2 cores. For the CNN
that is the backend `pmap` over one XLA device a core, so that clients train side by
side: 0.85 s against 1.1 s of the backend `jit`, which trains one client after the other
with a thread a core. For the linear model it is `jit`: 0.03 s against 0.05 s. In JAX
0.4 XLA's former CPU runtime is used, since the newer one took 1.4 s for the CNN. These
are quiet moments of a shared machine; in busy ones the CNN took up to 1.6 s.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import fedjax
    import jax

PACKAGES = ("fedjax", "jax")
INSTALL = "pip install fedjax==0.0.17 jax==0.4.38 jaxlib==0.4.38"
BACKENDS = {"cnn": "pmap", "linear": "jit"}
CNN_PARAMETERS = 1_018_174
MISSING_STATUS = 3


def check_packages() -> None:
    """Ends the program where a package of the peer is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} missing: run `{INSTALL}`", file=sys.stderr)
        sys.exit(MISSING_STATUS)


def load_arguments(path: pathlib.Path) -> Mapping[str, np.ndarray]:
    """Returns the arrays of the file by name.

    Raises:
        ValueError: The model is not known.
    """
    with np.load(path) as arrays:
        arguments = dict(arrays)
    name = str(arguments["model"])
    if name not in BACKENDS:
        raise ValueError(f"`model` must be one of {list(BACKENDS)}. Found {name!r}.")
    return arguments


def set_environment(backend: str, clients: int) -> None:
    """Sets what JAX reads when it is imported."""
    options = [os.environ.get("XLA_FLAGS", "")]
    if backend == "pmap":
        devices = min(len(os.sched_getaffinity(0)), clients)
        options.append(f"--xla_force_host_platform_device_count={devices}")
    if importlib.metadata.version("jax").startswith("0.4."):
        options.append("--xla_cpu_use_thunk_runtime=false")
    os.environ["XLA_FLAGS"] = " ".join(options)
    os.environ["JAX_PLATFORMS"] = "cpu"
    # FedJAX takes the outputs of a device to be without the axis of devices.
    os.environ["JAX_PMAP_NO_RANK_REDUCTION"] = "0"


def build_forward(name: str, num_classes: int) -> Callable[[Any], jax.Array]:
    """Returns the forward pass in training, for Haiku: from a batch to logits.

    Kernels are Glorot uniform draws at first, those of the linear model and all biases
    zero.
    """
    import haiku as hk
    import jax

    glorot = hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")

    def apply_cnn(x: jax.Array) -> jax.Array:
        """Returns the logits of the convolutional network."""
        x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID", w_init=glorot)(x))
        x = hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)
        x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID", w_init=glorot)(x))
        x = hk.dropout(hk.next_rng_key(), 0.25, hk.Flatten()(x))
        x = jax.nn.relu(hk.Linear(128, w_init=glorot)(x))
        x = hk.dropout(hk.next_rng_key(), 0.5, x)
        return hk.Linear(num_classes, w_init=glorot)(x)

    def apply_linear(x: jax.Array) -> jax.Array:
        """Returns the logits of multinomial logistic regression."""
        return hk.Linear(num_classes, w_init=jax.numpy.zeros)(hk.Flatten()(x))

    apply = {"cnn": apply_cnn, "linear": apply_linear}[name]
    return lambda batch: apply(batch["x"])


def build_model(name: str, num_classes: int) -> fedjax.Model:
    """Returns FedJAX's model with the cross entropy as its loss."""
    import fedjax
    import haiku as hk

    def compute_loss(batch: Mapping[str, jax.Array], logits: jax.Array) -> jax.Array:
        """Returns the loss of each example."""
        return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)

    sample = {
        "x": np.zeros([1, 28, 28, 1], np.float32),
        "y": np.zeros([1], np.int32),
    }
    forward = hk.transform(build_forward(name, num_classes))
    return fedjax.create_model_from_haiku(forward, sample, compute_loss)


def build_round(arguments: Mapping[str, np.ndarray]) -> Callable[[int], Any]:
    """Returns a function from the number of a round, which goes on from the last one.

    Raises:
        ValueError: The CNN is not the one of 1,018,174 parameters for 62 classes.
    """
    import fedjax
    import jax

    name, num_classes = str(arguments["model"]), int(arguments["num_classes"])
    clients, batches, batch_size = arguments["y"].shape
    fedjax.set_for_each_client_backend(BACKENDS[name])
    model = build_model(name, num_classes)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(float(arguments["learning_rate"])),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=batch_size, num_epochs=1, skip_shuffle=True
        ),
    )
    parameters = model.init(jax.random.PRNGKey(0))
    found = sum(weight.size for weight in jax.tree_util.tree_leaves(parameters))
    if name == "cnn" and num_classes == 62 and found != CNN_PARAMETERS:
        raise ValueError(f"The CNN must have {CNN_PARAMETERS} weights. Found {found}.")
    x = arguments["x"].reshape(clients, batches * batch_size, 28, 28, 1)
    y = arguments["y"].reshape(clients, batches * batch_size)
    datasets = [
        fedjax.ClientDataset({"x": of_client, "y": labels})
        for of_client, labels in zip(x, y, strict=True)
    ]
    state = algorithm.init(parameters)

    def run(number: int) -> Any:
        """Returns the weights after one more round, when they are there."""
        nonlocal state
        keys = jax.random.split(jax.random.PRNGKey(number), clients)
        cohort = list(zip(range(clients), datasets, keys, strict=True))
        state, _ = algorithm.apply(state, cohort)
        return jax.block_until_ready(state.params)

    return run


def main() -> None:
    """Times the rounds and prints them."""
    parser = argparse.ArgumentParser(description="Times rounds of FedJAX.")
    parser.add_argument("data", type=pathlib.Path, help="the .npz file")
    path = parser.parse_args().data
    check_packages()
    arguments = load_arguments(path)
    set_environment(BACKENDS[str(arguments["model"])], len(arguments["y"]))
    # FedJAX gives buffers away that XLA cannot use again.
    warnings.filterwarnings("ignore", "Some donated buffers")
    import fedjax.algorithms  # noqa: F401

    times = [time.perf_counter()]
    run = build_round(arguments)
    for number in range(int(arguments["repeats"]) + 1):
        run(number)
        times.append(time.perf_counter())
    first, *seconds = (b - a for a, b in zip(times, times[1:], strict=False))
    fedjax_version, jax_version = (importlib.metadata.version(p) for p in PACKAGES)
    system = f"FedJAX {fedjax_version}, JAX {jax_version}"
    figures = {"system": system, "seconds": seconds, "first_seconds": first}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
