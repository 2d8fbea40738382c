"""Speed of a peer: rounds of federated averaging in pfl with PyTorch.

  python -m benchmarks.peer_pfl DATA.npz
  python benchmarks/peer_pfl.py DATA.npz     # with any interpreter that has the peer

It needs `pip install pfl==0.6.0 torch==2.13.0` and no other module of this repository.
DATA.npz holds `x` (float32 [clients, batches, batch_size, 28, 28, 1]), `y` (int32
[clients, batches, batch_size]), `model` ("cnn" or "linear"), `num_classes`,
`learning_rate` and `repeats`. The last line of stdout is a JSON object: `system`,
`seconds` of each repeat after one warm-up round, and `first_seconds`, which is building
and the warm-up round, without starting Python and importing. The exit status is 3 where
a package is missing.

What is timed is pfl's own `FederatedAveraging` on its `SimulatedBackend` without
postprocessors, from the end of a round to the end of the next. All cores are used by
pfl's own way of training on many of them: one process a core under `torchrun`, with one
thread each, and the updates summed by gloo over the loopback interface. That was faster
than one process with a thread a core: 0.6 s against 0.75 s for the CNN, 20 clients x
100 examples on 2 cores, and 0.025 s against 0.040 s for the linear model. The CNN is in
PyTorch's `channels_last` format (in one process 0.75 s against 0.9 s). Nothing is
evaluated, since pfl would do that in extra passes over the data. These are quiet
moments of a shared machine; in busy ones the CNN took up to 1.2 s.
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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    import torch

PACKAGES = ("pfl", "torch")
INSTALL = "pip install pfl==0.6.0 torch==2.13.0"
CNN_PARAMETERS = 1_018_174
# torchrun sets it for the processes that it starts.
WORKER_VARIABLE = "TORCHELASTIC_RUN_ID"
MISSING_STATUS = 3


def check_packages() -> None:
    """Ends the program where a package of the peer is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} missing: run `{INSTALL}`", file=sys.stderr)
        sys.exit(MISSING_STATUS)


def load_arguments(path: pathlib.Path) -> Mapping[str, np.ndarray]:
    """Returns the arrays of the file by name."""
    with np.load(path) as arrays:
        return dict(arrays)


def start_workers(path: pathlib.Path, clients: int) -> NoReturn:
    """Turns this process into the launcher of one worker a core."""
    workers = min(len(os.sched_getaffinity(0)), clients)
    options = [
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={workers}",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # The workers are on this machine, whatever its name resolves to.
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.execve(sys.executable, [*command, __file__, str(path)], environment)


def build_network(name: str, num_classes: int) -> torch.nn.Module:
    """Returns the model with the `loss` and `metrics` that pfl asks for.

    Raises:
        ValueError: The name is not known, or the CNN is not the one of 1,018,174
            parameters for 62 classes.
    """
    import torch

    class Network(torch.nn.Sequential):
        """A model with its loss."""

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """Returns the mean cross entropy of a batch in training."""
            self.train()
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> Mapping[str, Any]:
            """Returns no metrics: the evaluation of pfl's first round is empty."""
            del x, y
            return {}

    nn = torch.nn
    if name == "cnn":
        network = Network(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(11 * 11 * 64, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        ).to(memory_format=torch.channels_last)
    elif name == "linear":
        network = Network(nn.Flatten(), nn.Linear(28 * 28, num_classes))
    else:
        raise ValueError(f"`model` must be 'cnn' or 'linear'. Found {name!r}.")
    found = sum(weight.numel() for weight in network.parameters())
    if name == "cnn" and num_classes == 62 and found != CNN_PARAMETERS:
        raise ValueError(f"The CNN must have {CNN_PARAMETERS} weights. Found {found}.")
    return initialize(network, zero=name == "linear")


def initialize(network: torch.nn.Module, *, zero: bool) -> torch.nn.Module:
    """Sets kernels to zero or Glorot uniform draws and biases to zero, in place."""
    import torch

    for weight in network.parameters():
        if zero or weight.dim() == 1:
            torch.nn.init.zeros_(weight)
        else:
            torch.nn.init.xavier_uniform_(weight)
    return network


def build_federated_dataset(
    x: np.ndarray, y: np.ndarray, rank: int, workers: int
) -> Any:
    """Returns pfl's data set of the clients of this worker.

    pfl calls the sampler of users once for each worker and keeps the draw of this
    worker, so each of this worker's clients comes `workers` times in a row. Every round
    is then over each client once, even where workers have different numbers of them.
    """
    import torch
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler

    clients = y.shape[0]
    images = torch.from_numpy(x.reshape(clients, -1, 1, 28, 28))
    labels = torch.from_numpy(y.reshape(clients, -1).astype(np.int64))
    datasets = {
        client: Dataset((images[client], labels[client]))
        for client in range(rank, clients, workers)
    }
    draws = [client for client in datasets for _ in range(workers)]
    return FederatedDataset(datasets.__getitem__, MinimizeReuseUserSampler(draws))


def train(arguments: Mapping[str, np.ndarray]) -> list[float]:
    """Returns the seconds of each round, of which the first includes building."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import distributed
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Clock(TrainingProcessCallback):
        """Reads the clock at the end of each round."""

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            """Returns that training goes on."""
            del aggregate_metrics, model, central_iteration
            times.append(time.perf_counter())
            return False, Metrics()

    torch.set_num_threads(1)
    times = [time.perf_counter()]
    clients, _, batch_size = arguments["y"].shape
    rounds = int(arguments["repeats"]) + 1
    rank, workers = distributed.global_rank, distributed.world_size
    # The workers draw the same weights and seeds, and then dropout of their own.
    np.random.seed(0)
    torch.manual_seed(0)
    network = build_network(str(arguments["model"]), int(arguments["num_classes"]))
    torch.manual_seed(rank + 1)
    data = build_federated_dataset(arguments["x"], arguments["y"], rank, workers)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=None),
        PyTorchModel(
            network,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(
            local_num_epochs=1,
            local_batch_size=batch_size,
            local_learning_rate=float(arguments["learning_rate"]),
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    # A worker that just ended could abort another one's threads.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank != 0:
        sys.exit()
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def main() -> None:
    """Times the rounds and prints them."""
    parser = argparse.ArgumentParser(description="Times rounds of pfl.")
    parser.add_argument("data", type=pathlib.Path, help="the .npz file")
    path = parser.parse_args().data
    check_packages()
    arguments = load_arguments(path)
    if WORKER_VARIABLE not in os.environ:
        start_workers(path, len(arguments["y"]))
    # pfl's use of a name that PyTorch deprecates.
    warnings.filterwarnings("ignore", ".*reduce_op", FutureWarning)
    first, *seconds = train(arguments)
    pfl, pytorch = (importlib.metadata.version(name) for name in PACKAGES)
    system = f"pfl {pfl}, PyTorch {pytorch.partition('+')[0]}"
    figures = {"system": system, "seconds": seconds, "first_seconds": first}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
