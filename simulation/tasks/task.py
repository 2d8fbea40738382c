"""What a task is: clients with data, test data, models and the metric that counts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from simulation.model import Model
from simulation.population.federated_data import FederatedData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A learning task.

    Attributes:
        name: Its name in outputs. Where the data are made up, it says so.
        description: One sentence: what the data are, where they come from, and, for
            data that are not real, that they are not.
        train: The clients' training data.
        test: The test data, by client where they have clients.
        has_test_users: Whether test data are of users, so that metrics of each mean
            something.
        models: Builds a model, by name. The first is the default.
        metric: The name of the metric that the task is judged by.
        validation: Data for choosing settings, or None.
        identity: What says whether two runs had the same data, as JSON values.
        eval_examples: The most test examples that an evaluation takes unless told;
            None for all.
        caveats: What a privacy statement does not cover because of the data: a
            vocabulary that was counted on them, for example.
    """

    name: str
    description: str
    train: FederatedData
    test: FederatedData
    has_test_users: bool
    models: Mapping[str, Callable[[], Model]]
    metric: str
    validation: FederatedData | None = None
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_examples: int | None = None
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            if not getattr(self, name).client_ids:
                raise ValueError(f"`{name}` must have clients. Found none.")
        if not self.models:
            raise ValueError("`models` must not be empty.")

    @property
    def is_synthetic(self) -> bool:
        """Whether the data stand for others (--synthetic_data)."""
        return bool(self.identity.get("synthetic_data"))

    @property
    def num_clients(self) -> int:
        """The number N of clients."""
        return len(self.train.client_ids)

    def build_model(self, name: str | None = None) -> Model:
        """Returns a model by name, the task's default for None.

        Raises:
            ValueError: If the task has no such model.
        """
        if name is None:
            name = next(iter(self.models))
        if name not in self.models:
            raise ValueError(
                f"`model` must be one of {', '.join(self.models)} for the task "
                f"{self.name}. Found {name!r}."
            )
        return self.models[name]()
