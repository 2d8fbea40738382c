"""What aggregation makes of the clients' updates: norms by part, clips, signal, noise.

A factory goes around another one and measures the same updates. What it measures is an
exact function of private data, which no epsilon covers: it is for the simulation alone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from distributed_dp.clipping import clip_by_l2_norm, compute_l2_norm
from distributed_dp.update_layout import NoiseSeeds, UpdateLayout

_INNER, _MEASURED = "aggregator", "updates"
# A part of an update, as measured: of all, the representation and the head.
_PARTS = ("whole", "representation", "head")


class MeasuringFactory(tff.aggregators.UnweightedAggregationFactory):
    """Another factory, with measurements of the updates that go into it.

    Guarantees: state and result are the other factory's. Measurements are the other's
    under "aggregator", and sums over clients under "updates": `compute_row` reads them.
    """

    def __init__(
        self,
        inner: tff.aggregators.UnweightedAggregationFactory,
        *,
        l2_clip: float | None,
        num_representation_weights: int,
    ):
        """Initialises the factory.

        Args:
            inner: The other factory, for values with carried seeds.
            l2_clip: Its clip; None for none.
            num_representation_weights: How many of the first arrays of an update are
                the representation; the others are a head.
        """
        if l2_clip is not None and not 0 < l2_clip < math.inf:
            raise ValueError(f"`l2_clip` must be positive. Found {l2_clip!r}.")
        if num_representation_weights < 1:
            raise ValueError(
                "`num_representation_weights` must be >= 1. Found "
                f"{num_representation_weights!r}."
            )
        self._inner = inner
        self._l2_clip = l2_clip
        self._num_representation_weights = num_representation_weights

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Builds the process for <update, int32[2], int32>."""
        inner = self._inner.create(value_type)
        layout = UpdateLayout(value_type, NoiseSeeds.CARRIED)
        leaves = tff.structure.flatten(layout.update_type)
        size = sum(
            math.prod(leaf.shape) for leaf in leaves[: self._num_representation_weights]
        )

        @tff.tensorflow.computation(value_type)
        def measure_fn(value: Any) -> Any:
            return _measure(layout.flatten(value[0]), size, self._l2_clip)

        @tff.tensorflow.computation(measure_fn.type_signature.result)
        def finish_fn(sums: Any) -> Any:
            found = collections.OrderedDict(
                (name, value) for name, value in sums.items() if name != "clipped"
            )
            for name, part in _divide(sums["clipped"], size).items():
                norm = tf.cast(tf.squeeze(compute_l2_norm(part), -1), tf.float32)
                found[f"norm_of_clipped_sum_{name}"] = norm
            return found

        @tff.federated_computation(
            inner.initialize.type_signature.result,
            tff.FederatedType(value_type, tff.CLIENTS),
        )
        def next_fn(state: Any, value: Any) -> Any:
            output = inner.next(state, value)
            sums = tff.federated_sum(tff.federated_map(measure_fn, value))
            measured = tff.federated_zip(
                collections.OrderedDict(
                    [
                        (_INNER, output.measurements),
                        (_MEASURED, tff.federated_map(finish_fn, sums)),
                    ]
                )
            )
            return tff.templates.MeasuredProcessOutput(
                output.state, output.result, measured
            )

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartRow:
    """A part of the updates of one round.

    Attributes:
        mean_norm: The mean norm over clients, before the clip.
        clipped_norm: The same after the clip of whole updates.
        agreement: The norm of the sum of clipped updates over the sum of their norms:
            1 where all clients want the same, about 1 / sqrt(clients) where they want
            unrelated things; NaN where nobody wants anything.
        signal_to_noise: The norm of the mean clipped update over the root mean square
            norm of the noise in the mean; inf without noise.
    """

    mean_norm: float
    clipped_norm: float
    agreement: float
    signal_to_noise: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The updates of one round.

    Attributes:
        num_clients: Clients that reported.
        fraction_clipped: The part of them whose update was clipped; NaN for no client.
        whole: Of the whole updates.
        representation: Of the representation in them.
        head: Of the head in them; None where no head is sent.
    """

    num_clients: int
    fraction_clipped: float
    whole: PartRow
    representation: PartRow
    head: PartRow | None


def compute_row(
    measurements: Mapping[str, Any],
    *,
    central_stddev: float,
    num_representation: int,
    num_head: int,
) -> Row:
    """Returns a round's row, of what `MeasuringFactory` measured.

    Args:
        measurements: All that the aggregation measured.
        central_stddev: The standard deviation of the sum's noise, per coordinate.
        num_representation: The numbers of the representation in an update.
        num_head: Those of the head; 0 where none is sent.
    """
    sums = {name: float(value) for name, value in measurements[_MEASURED].items()}
    count = sums["count"]
    dims = (num_representation + num_head, num_representation, num_head)

    def build(name: str, dim: int) -> PartRow:
        signal = sums[f"norm_of_clipped_sum_{name}"]
        noise = central_stddev * math.sqrt(dim)
        clipped = sums[f"clipped_norm_{name}"]
        return PartRow(
            mean_norm=_divide_numbers(sums[f"norm_{name}"], count),
            clipped_norm=_divide_numbers(clipped, count),
            agreement=_divide_numbers(signal, clipped),
            # Both are divided by the expected cohort to make a mean.
            signal_to_noise=signal / noise if noise else math.inf,
        )

    whole, representation, head = (
        build(name, dim) for name, dim in zip(_PARTS, dims, strict=True)
    )
    return Row(
        num_clients=round(count),
        fraction_clipped=_divide_numbers(sums["num_clipped"], count),
        whole=whole,
        representation=representation,
        head=head if num_head else None,
    )


def _measure(vector: tf.Tensor, size: int, l2_clip: float | None) -> Any:
    """Returns what is summed over clients; an update that is not finite is 0."""
    is_finite = tf.reduce_all(tf.math.is_finite(vector))
    vector = tf.where(is_finite, vector, tf.zeros_like(vector))
    clipped, is_clipped = vector, tf.constant(0.0)
    if l2_clip is not None:
        clipped, norm = clip_by_l2_norm(vector, l2_clip)
        is_clipped = tf.cast(tf.squeeze(norm, -1) > l2_clip, tf.float32)
    found = collections.OrderedDict(count=tf.constant(1.0), num_clipped=is_clipped)
    for prefix, of in (("norm", vector), ("clipped_norm", clipped)):
        for name, part in _divide(of, size).items():
            norm = tf.cast(tf.squeeze(compute_l2_norm(part), -1), tf.float32)
            found[f"{prefix}_{name}"] = norm
    found["clipped"] = clipped
    return found


def _divide(vector: tf.Tensor, size: int) -> dict[str, tf.Tensor]:
    """Returns the whole vector, and its two parts, of which one may be empty."""
    return dict(zip(_PARTS, (vector, vector[:size], vector[size:]), strict=True))


def _divide_numbers(a: float, b: float) -> float:
    return a / b if b else math.nan
