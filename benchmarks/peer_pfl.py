"""Speed of a peer: a round of federated averaging in pfl with PyTorch.

python -m benchmarks.peer_pfl DATA.npz
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

X = dict(a.split("=") for a in os.environ.get("XP", "").split(",") if a)


def build_network(name: str, num_classes: int) -> torch.nn.Module:
    from torch import nn

    class Network(nn.Module):
        def __init__(self, *layers) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def loss(self, x, y):
            self.train()
            return nn.functional.cross_entropy(self.layers(x), y)

        def metrics(self, x, y):
            return {}

    if name == "cnn":
        net = Network(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 121, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        )
    else:
        net = Network(nn.Flatten(), nn.Linear(784, num_classes))
    return net


def main():
    data = dict(np.load(sys.argv[1]))
    import torch

    torch.set_num_threads(int(X.get("threads", 2)))
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    started = time.perf_counter()
    clients, batches, bs = data["y"].shape
    x = torch.from_numpy(data["x"].reshape(clients, batches * bs, 1, 28, 28))
    y = torch.from_numpy(data["y"].reshape(clients, batches * bs).astype(np.int64))
    ds = [Dataset((x[i], y[i])) for i in range(clients)]
    fd = FederatedDataset(ds.__getitem__, MinimizeReuseUserSampler(range(clients)))
    net = build_network(str(data["model"]), int(data["num_classes"]))
    if X.get("cl"):
        net = net.to(memory_format=torch.channels_last)
    if X.get("zero"):
        for p in net.parameters():
            p.data.zero_()
    kw = {}
    if X.get("fused"):
        kw = dict(fused=True)
    if X.get("foreach"):
        kw = dict(foreach=True)
    model = PyTorchModel(
        net,
        lambda p, lr: torch.optim.SGD(p, lr=lr, **kw),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    times = [started]

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, m, model, *, central_iteration):
            times.append(time.perf_counter())
            from pfl.metrics import Metrics

            return False, Metrics()

    repeats = int(data["repeats"])
    backend = SimulatedBackend(fd, None)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=repeats + 1,
            evaluation_frequency=repeats + 1,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=bs,
            local_num_epochs=1,
            local_learning_rate=float(data["learning_rate"]),
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    print(sum(p.numel() for p in net.parameters()))
    if X.get("save"):
        np.savez(X["save"], *[p.detach().numpy() for p in net.parameters()])
    print(X, np.round(np.diff(times), 3))


main()
