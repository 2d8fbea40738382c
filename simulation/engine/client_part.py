"""The clients' part of a compiled computation: all that workers elsewhere are sent.

The server's functions may hold what clients must not see: the seed of its noise.
"""

from typing import Any

import tensorflow_federated as tff

from simulation.engine.local_evaluation import Block

_CLIENTS_URIS = {
    tff.framework.FEDERATED_AGGREGATE.uri,
    tff.framework.FEDERATED_EVAL_AT_CLIENTS.uri,
    tff.framework.FEDERATED_MAP.uri,
    tff.framework.FEDERATED_MAP_ALL_EQUAL.uri,
}


def strip_server_functions(
    computation: tff.framework.ConcreteComputation,
) -> tff.framework.ConcreteComputation:
    """Returns a computation in which the server's functions are empty.

    Types, and so the plan that `plan.build_plan` makes of it, stay the same.
    """
    block = _strip(computation.to_building_block())
    return tff.framework.ConcreteComputation.from_building_block(block)


def _strip(block: Block) -> Block:
    """Empties every function that is not an intrinsic's at the clients."""
    if isinstance(block, tff.framework.Lambda):
        return tff.framework.Lambda(
            block.parameter_name, block.parameter_type, _strip(block.result)
        )
    if isinstance(block, tff.framework.Block):
        local_values = [(name, _strip(value)) for name, value in block.locals]
        return tff.framework.Block(local_values, _strip(block.result))
    if isinstance(block, tff.framework.Call):
        function = block.function
        is_clients = (
            isinstance(function, tff.framework.Intrinsic)
            and function.uri in _CLIENTS_URIS
        )
        return block if is_clients else _empty_all(block)
    return block


def _empty_all(block: Block) -> Block:
    """Returns a block in which all TensorFlow is empty."""

    def empty(inner: Block) -> tuple[Block, bool]:
        if not isinstance(inner, tff.framework.CompiledComputation):
            return inner, False
        proto: Any = type(inner.proto)()
        proto.CopyFrom(inner.proto)
        proto.tensorflow.ClearField("graph_def")
        proto.tensorflow.ClearField("initialize_op")
        stub = tff.framework.CompiledComputation(
            proto, type_signature=inner.type_signature
        )
        return stub, True

    return tff.framework.transform_postorder(block, empty)[0]
