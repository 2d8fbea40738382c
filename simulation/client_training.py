"""A client's local training as a pure function of tensors.

A client's data are its examples, whole, and which of them make up each batch. Then the
loop has no data set and no variables in it; and where a model is made of dense algebra,
many clients can train as one stack (`engine.lockstep`): a batch that a client does not
have, or an example that a batch does not have, is masked.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from simulation.engine import lockstep
from simulation.local_solver import LocalSolver, LocalTerms, Sums
from simulation.model import Model, PerExample, Weights
from simulation.population.federated_data import FederatedData

# Clients whose sizes decide whether stacks pay, and the steps from which they do.
_LOOKED_AT = 16
_MIN_STEPS = 4

# (weights, examples, batches, seed, shift) -> (what the solver carried, sums). The last
# argument is None, or left out, without a shift.
Training = Callable[..., tuple[Weights, Sums]]


def draw_batches(
    num_examples: int, *, batch_size: int, num_epochs: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns which examples make up each batch.

    Args:
        num_examples: The client's examples.
        batch_size: Examples in a batch; the last one of an epoch may be smaller.
        num_epochs: Passes over the examples, each in a new order.
        rng: Draws the orders.

    Returns:
        int32[steps, width]: one more than the index of an example; 0, at the end of a
        row alone, for none. The width is `batch_size`, or less for a client with less.
    """
    width = min(batch_size, _round_up(num_examples))
    steps = -(-num_examples // width)
    orders = np.zeros([num_epochs, steps * width], np.int32)
    drawn = orders[:, :num_examples]
    drawn[:] = np.arange(1, num_examples + 1)
    # What one `permutation` after the other would draw, in a fifth of the time.
    rng.permuted(drawn, axis=1, out=drawn)
    return orders.reshape([num_epochs * steps, width])


def pad_client(
    examples: Mapping[str, np.ndarray],
    batches: np.ndarray,
    *,
    num_batches: int | None = None,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns examples and batches with zeros behind them that no batch refers to.

    Clients of similar size get equal shapes, which `engine.lockstep` can stack: the
    numbers of examples and of batches are rounded up to powers of two.

    Args:
        examples: The client's.
        batches: What `draw_batches` returns for them.
        num_batches: Those of a client of this size that is no straggler, whose shape a
            straggler gets too; None: the number that there are.
    """

    def pad(array: np.ndarray, size: int | None = None) -> np.ndarray:
        rounded = _round_up(max(len(array), size or 0))
        if rounded == len(array):
            return array
        padded = np.empty([rounded, *array.shape[1:]], array.dtype)
        padded[: len(array)], padded[len(array) :] = array, 0
        return padded

    padded = {name: pad(part) for name, part in examples.items()}
    return padded, pad(batches, num_batches)


def _round_up(size: int) -> int:
    """Returns the power of two that is `size` or the next above it; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()


def choose_stacking(
    model: Model, data: FederatedData, *, batch_size: int, num_epochs: int
) -> Model:
    """Returns the model, stackable only where stacks pay.

    With few steps a client's calls cost more than its training, and stacks add calls.
    The choice looks at the sizes of some clients, always the same ones.
    """
    if not model.stackable:
        return model
    ids = data.client_ids[:: max(1, len(data.client_ids) // _LOOKED_AT)]
    sizes = [len(data.load(client_id)[1]) for client_id in ids[:_LOOKED_AT]]
    steps = [num_epochs * -(-size // batch_size) for size in sizes]
    return dataclasses.replace(model, stackable=bool(np.median(steps) >= _MIN_STEPS))


def build_training(
    model: Model,
    solver: LocalSolver,
    *,
    proximal_strength: float = 0.0,
) -> Training:
    """Returns local training on one client.

    With a proximal strength mu the client minimises its loss plus mu / 2 times the
    squared distance from where it started (FedProx): the term's gradient goes into the
    optimizer with the loss's, momentum included. With 0 nothing is added. A shift, if
    one is given, is added to the gradients.

    It returns what the solver carried, which begins with the trained weights, and the
    sums over examples of the loss and the metrics in training, with their number:
    "num_examples", "loss", the metrics' names and "metric_weight" where the model has
    such, all from the forward pass that the gradient needs. `model.compute_means`
    divides them.
    """
    loop = LocalLoop(model=model, solver=solver, proximal_strength=proximal_strength)
    if not model.stackable:
        return loop.run

    def train(
        weights: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
        shift: Weights | None = None,
    ) -> tuple[Weights, Sums]:
        shift = () if shift is None else tuple(shift)
        numbers = loop.list_numbers(weights)
        return call_stacked(
            loop.run_stack,
            (tuple(weights), dict(examples), batches, seed, numbers, shift),
        )

    return train


def call_stacked(function: Callable[..., Any], arguments: Any) -> Any:
    """Calls a function of stacked clients on one client's structures of tensors.

    See `lockstep.call_stacked`: the engine may run the call for many clients together.

    Args:
        function: Of structures of tensors whose first axis counts clients.
        arguments: A tuple of one client's.
    """
    structure: list[Any] = []

    def compute(*stacked: tf.Tensor) -> list[tf.Tensor]:
        result = function(*tf.nest.pack_sequence_as(arguments, stacked))
        structure[:] = [tf.nest.map_structure(lambda _: 0, result)]
        return tf.nest.flatten(result)

    flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(arguments)]
    results = lockstep.call_stacked(compute, flat)
    return tf.nest.pack_sequence_as(structure[0], results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalLoop:
    """A solver's steps on a client's batches, alone or in a stack of clients.

    Attributes:
        model: The model.
        solver: Takes the steps.
        proximal_strength: mu of a proximal term; 0 adds nothing.
    """

    model: Model
    solver: LocalSolver
    proximal_strength: float = 0.0

    def __post_init__(self) -> None:
        _check_proximal_strength(self.proximal_strength)

    def run(
        self,
        weights: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seed: tf.Tensor,
        shift: Weights | None = None,
    ) -> tuple[Weights, Sums]:
        """Returns what the solver carried on one client, and the sums.

        Args:
            weights: Where it starts.
            examples: All of the client's "x" and "y".
            batches: As `draw_batches` returns them.
            seed: int32[2], for dropout layers.
            shift: What is added to the gradients, or None.
        """
        num_steps = count_rows(batches)
        terms = LocalTerms(
            initial=tuple(weights), strength=self.proximal_strength or None, shift=shift
        )

        def step(number: tf.Tensor, *carry: Any) -> Any:
            rows = batches[number]
            rows = rows[: tf.math.count_nonzero(rows, dtype=tf.int32)] - 1
            batch = {name: tf.gather(part, rows) for name, part in examples.items()}
            stepped = _step(
                self.model, self.solver, number, carry, batch, seed, terms=terms
            )
            return number + 1, *stepped

        start = (tf.constant(0), *_begin(self.model, self.solver, weights))
        _, trained, _, sums = tf.while_loop(
            lambda number, *_: number < num_steps, step, start
        )
        return trained, sums

    def list_numbers(self, weights: Weights) -> dict[str, list[tf.Tensor]]:
        """Returns learning rates and the like, which a stack is given.

        They are not written into the program, which is then compiled once for all
        their values.

        Args:
            weights: Where a client starts.
        """
        _, state, _ = _begin(self.model, self.solver, weights)
        leaves = map(tf.convert_to_tensor, tf.nest.flatten(state))
        numbers = {"state": [leaf for leaf in leaves if not leaf.shape.rank]}
        if self.proximal_strength:
            numbers["strength"] = [tf.constant(self.proximal_strength)]
        return numbers

    def run_stack(
        self,
        weights: Weights,
        examples: Mapping[str, tf.Tensor],
        batches: tf.Tensor,
        seeds: tf.Tensor,
        numbers: Mapping[str, list[tf.Tensor]],
        shift: Weights = (),
    ) -> tuple[Weights, Sums]:
        """Does what `run` does for clients stacked along the first axis of all tensors.

        Args:
            weights: Theirs.
            examples: Theirs.
            batches: Theirs, of one shape: rows of zeros are no steps.
            seeds: Theirs.
            numbers: What `list_numbers` returns, of each.
            shift: Theirs; () for none.
        """
        num_clients = tf.shape(batches)[0]
        num_steps = tf.reduce_max(count_rows(batches))

        def step(number: tf.Tensor, *carry: Any) -> Any:
            rows = batches[:, number]
            mask = tf.cast(rows > 0, tf.float32)
            rows = tf.maximum(rows - 1, 0)
            batch = {
                name: tf.gather(part, rows, batch_dims=1)
                for name, part in examples.items()
            }

            def step_of_one(arguments: Any) -> Any:
                before, batch, seed, mask, own = arguments
                after = _step(
                    self.model,
                    self.solver,
                    number,
                    before,
                    batch,
                    seed,
                    mask,
                    terms=LocalTerms(**own),
                )
                is_real = tf.reduce_any(mask > 0)
                return tf.nest.map_structure(
                    lambda new, old: tf.where(is_real, new, old), after, before
                )

            stepped = tf.vectorized_map(
                step_of_one,
                (carry, batch, seeds, mask, own),
                fallback_to_while_loop=False,
            )
            return number + 1, *stepped

        def repeat(leaf: Any) -> tf.Tensor:
            leaf = tf.convert_to_tensor(leaf)
            return tf.broadcast_to(leaf, tf.concat([[num_clients], tf.shape(leaf)], 0))

        own: dict[str, Any] = {"initial": tuple(weights)}
        if "strength" in numbers:
            [own["strength"]] = numbers["strength"]
        if shift:
            own["shift"] = tuple(shift)
        carried = tf.vectorized_map(self.solver.begin, tuple(weights))
        state = self.solver.initialize(
            tf.nest.map_structure(lambda leaf: leaf[0], carried)
        )
        given = iter(numbers["state"])
        state = tf.nest.map_structure(
            lambda leaf: repeat(leaf) if np.ndim(leaf) else next(given), state
        )
        sums = tf.nest.map_structure(repeat, build_sums(self.model))
        start = (tf.constant(0), carried, state, sums)
        invariants = tf.nest.map_structure(
            lambda tensor: tf.TensorShape([None, *tensor.shape[1:]]), start[1:]
        )
        _, trained, _, sums = tf.while_loop(
            lambda number, *_: number < num_steps,
            step,
            start,
            shape_invariants=(tf.TensorShape([]), *invariants),
        )
        return trained, sums


def train_on_dataset(
    model: Model,
    solver: LocalSolver,
    weights: Weights,
    dataset: tf.data.Dataset,
    seed: tf.Tensor,
    *,
    proximal_strength: float = 0.0,
) -> tuple[Weights, Sums]:
    """Trains on one client's batches as they come. See `build_training`."""
    _check_proximal_strength(proximal_strength)
    terms = LocalTerms(initial=tuple(weights), strength=proximal_strength or None)

    def step(carry: Any, batch: Any) -> Any:
        number, *rest = carry
        stepped = _step(model, solver, number, rest, batch, seed, terms=terms)
        return number + 1, *stepped

    start = (tf.constant(0), *_begin(model, solver, weights))
    _, trained, _, sums = dataset.reduce(start, step)
    return trained, sums


def build_sums(model: Model) -> dict[str, tf.Tensor]:
    """Returns the sums of training before the first example."""
    zero = tf.zeros([], tf.float32)
    sums = collections.OrderedDict(num_examples=zero, loss=zero)
    sums.update((name, zero) for name in _list_metrics(model))
    return sums


def count_examples(batches: tf.Tensor) -> tf.Tensor:
    """Returns the number of examples of a client, of which every epoch has all."""
    return tf.maximum(tf.reduce_max(batches), 0)


def _check_proximal_strength(value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"`proximal_strength` must be finite and >= 0. Found {value!r}."
        )


def _begin(
    model: Model, solver: LocalSolver, weights: Weights
) -> tuple[Weights, Any, Sums]:
    """Returns what is carried, the state and the sums before the first step."""
    carried = solver.begin(tuple(weights))
    return carried, solver.initialize(carried), build_sums(model)


def _list_metrics(model: Model) -> dict[str, PerExample]:
    """Returns what is summed over examples beside the loss."""
    metrics = dict(model.metrics)
    if model.metric_weights is not None:
        metrics["metric_weight"] = model.metric_weights
    return metrics


def _step(
    model: Model,
    solver: LocalSolver,
    number: tf.Tensor,
    carry: Any,
    batch: Mapping[str, tf.Tensor],
    seed: tf.Tensor,
    mask: tf.Tensor | None = None,
    *,
    terms: LocalTerms,
) -> tuple[Weights, Any, Sums]:
    """Takes one step, on the examples where `mask` is 1, on all without a mask."""
    carried, state, sums = carry
    y = batch["y"]

    def average(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if mask is None:
            return tf.reduce_sum(values), tf.reduce_mean(values)
        total = tf.reduce_sum(tf.where(mask > 0, values, 0.0))
        return total, total / tf.maximum(tf.reduce_sum(mask), 1.0)

    def compute_gradients(weights: Weights) -> tuple[Weights, Sums]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            batch_seed = tf.random.experimental.stateless_fold_in(seed, number)
            outputs = model.predict(weights, batch["x"], batch_seed)
            losses = model.compute_loss(y, outputs)
            total, loss = average(losses)
        gradients = tape.gradient(loss, weights)
        count = tf.cast(tf.shape(losses)[0], tf.float32)
        found = collections.OrderedDict(
            num_examples=count if mask is None else tf.reduce_sum(mask), loss=total
        )
        for name, metric in _list_metrics(model).items():
            found[name] = average(metric(y, outputs))[0]
        return gradients, found

    carried, state, found = solver.step(compute_gradients, carried, state, terms)
    return carried, state, tf.nest.map_structure(tf.add, sums, found)


def count_rows(batches: tf.Tensor) -> tf.Tensor:
    """Returns the number of batches that have an example, which come first."""
    return tf.math.count_nonzero(batches[..., 0], axis=-1, dtype=tf.int32)
