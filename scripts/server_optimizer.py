"""The server's optimizer of a configuration."""

import tensorflow_federated as tff

from scripts.training_config import TrainingConfig


def build_server_optimizer(
    config: TrainingConfig,
) -> tff.learning.optimizers.Optimizer:
    """Returns SGD with momentum, Adagrad, Adam or Yogi, as TFF has them."""
    optimizers, momentum = tff.learning.optimizers, config.server_momentum
    if config.server_optimizer == "sgd":
        return optimizers.build_sgdm(config.server_lr, momentum=momentum or None)
    adaptive = {"learning_rate": config.server_lr, "epsilon": config.server_epsilon}
    if config.server_optimizer == "adagrad":
        return optimizers.build_adagrad(**adaptive)
    build = {"adam": optimizers.build_adam, "yogi": optimizers.build_yogi}
    return build[config.server_optimizer](beta_1=momentum, **adaptive)
