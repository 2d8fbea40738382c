"""Distributed differential privacy for federated learning.

The facade is lazy: importing the package loads nothing, `distributed_dp.accounting`
loads no TensorFlow, the mechanisms load no TensorFlow Federated, and a factory loads
what it needs when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AdaptiveClip": "adaptive_clip",
    "build_adaptive_clip": "adaptive_clip",
    "CentralGaussianFactory": "central_gaussian_factory",
    "Codec": "encoding",
    "DDGaussFactory": "ddgauss_factory",
    "DDGaussSumQuery": "queries",
    "DiscreteGaussianShares": "noise",
    "DistributedSkellamFactory": "skellam_factory",
    "NoiseSeeds": "update_layout",
    "NoPrivacyFactory": "no_privacy_factory",
    "RotationKind": "rotation",
    "SkellamShares": "noise",
    "SkellamSumQuery": "queries",
    "build_rotation": "rotation",
    "sample_discrete_gaussian": "discrete_gaussian",
    "sample_skellam": "skellam",
}

__all__ = sorted([*_HOMES, "accounting"])


def __getattr__(name: str) -> Any:
    """Loads the module of a public name when it is first used."""
    if name == "accounting":
        return importlib.import_module("distributed_dp.accounting")
    if name not in _HOMES:
        raise AttributeError(f"module 'distributed_dp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"distributed_dp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
