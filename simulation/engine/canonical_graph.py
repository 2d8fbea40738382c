"""Parts of graphs under names that say nothing but where something is.

TensorFlow counts what a process traces and puts the numbers in the names of functions
and of what they hold, so a function that is traced twice has two texts. Here names are
given anew, in the order of first use; what is left of two parts with one text is one
part, and may be compiled once. The text is what runs: were something lost on the way,
results would be wrong at once, not when two parts are mistaken for each other.
"""

import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from simulation.engine.graph_cut import CALLS, Part

# Of Python's gradients: what runs does not read it.
_GRADIENT = "_gradient_op_type"
# Which functions are each other's gradients: read where TensorFlow chooses between
# functions that implement one thing, which `_CHOICE` says.
_LINKS = ("forward_function_name", "backward_function_name")
_CHOICE = "api_implements"


class _NotCanonicalError(Exception):
    """A part cannot be told from another by its text."""


def canonicalize(part: Part, specs: Sequence[tf.TensorSpec]) -> tuple[bytes, Part]:
    """Returns the part's digest, and the part under the names of the canonical text.

    Args:
        part: A part.
        specs: Those of its feeds.

    Returns:
        The digest of the text and the specs, and the same part. Its functions' names
        hold the digest: TensorFlow has one place for those of a process. Nodes keep
        their order, so parts of one digest compute the same; parts that compute the
        same may have two digests.

    Raises:
        ValueError: If the part has a state, or what is not known.
    """
    try:
        renamed = _rename(part, specs, "f")
        digest = hashlib.sha256()
        shapes = [(spec.dtype.name, str(spec.shape)) for spec in specs]
        digest.update(repr((renamed.feeds, renamed.fetches, shapes)).encode())
        digest.update(renamed.content.SerializeToString(deterministic=True))
        prefix = f"canonical_{digest.hexdigest()[:32]}_"
        return digest.digest(), _rename(part, specs, prefix)
    except _NotCanonicalError as error:
        raise ValueError(f"`part` must be known by its text. Found {error}.") from error


def _rename(part: Part, specs: Sequence[tf.TensorSpec], prefix: str) -> Part:
    """Returns the part under new names; the names of functions begin with `prefix`."""
    if any(spec.dtype == tf.resource for spec in specs):
        raise _NotCanonicalError("a resource that is given")
    functions = _Functions(part.content.library, prefix)
    nodes = _number(node.name for node in part.content.node)
    feeds = {name: f"feed{i}:0" for i, name in enumerate(part.feeds)}

    def rename_source(source: str) -> str:
        if source.startswith("^"):
            return "^" + _find(nodes, source[1:])
        name, _, position = source.partition(":")
        full = f"{name}:{position or 0}"
        return feeds.get(full) or f"{_find(nodes, name)}:{position or 0}"

    content = tf.compat.v1.GraphDef(versions=part.content.versions)
    content.node.extend(part.content.node)
    for node in content.node:
        node.name = nodes[node.name]
        _set(node.input, [rename_source(source) for source in node.input])
        functions.rename_in(node, nodes)
    content.library.function.extend(functions.rename_all())
    return Part(
        content=content,
        feeds=tuple(feeds[name] for name in part.feeds),
        fetches=tuple(rename_source(name) for name in part.fetches),
    )


class _Functions:
    """The functions of a library that are used, in the order of first use."""

    def __init__(self, library: Any, prefix: str) -> None:
        if library.gradient or library.registered_gradients:
            raise _NotCanonicalError("gradients of functions")
        self._known = {f.signature.name: f for f in library.function}
        self._graph = tf.Graph()
        self._prefix = prefix
        self._names: dict[str, str] = {}

    def rename_all(self) -> list[Any]:
        """Returns all functions that are used, renamed."""
        renamed: list[Any] = []
        # Every function may add to the names.
        while len(renamed) < len(self._names):
            name = list(self._names)[len(renamed)]
            renamed.append(self._rename(self._known[name]))
        return renamed

    def rename_in(self, node: Any, nodes: Mapping[str, str]) -> None:
        """Renames what a node refers to in its attributes.

        Args:
            node: The node, which is changed.
            nodes: The new names of what is around it.
        """
        self._check(node)
        node.attr.pop(_GRADIENT, None)
        if "_class" in node.attr:
            places = node.attr["_class"].list.s
            _set(places, [_rename_place(place, nodes) for place in places])
        self._rename_attributes(node.attr)

    def _check(self, node: Any) -> None:
        """Raises an error if a node is not the same thing wherever its text is."""
        try:
            # A function may be an op of its name, too: it is not known here.
            op_def = self._graph.op_def_for_type(node.op)
        except RuntimeError as error:
            raise _NotCanonicalError(f"{node.op!r}") from error
        if op_def.is_stateful and node.op not in CALLS:
            raise _NotCanonicalError(f"{node.op!r}, which has a state")

    def _rename_attributes(self, attributes: MutableMapping[str, Any]) -> None:
        for key in sorted(attributes):
            attribute = attributes[key]
            if attribute.s.decode("utf-8", "replace") in self._known:
                raise _NotCanonicalError(f"a function's name as {key!r}")
            for function in (
                *([attribute.func] if attribute.HasField("func") else []),
                *attribute.list.func,
            ):
                function.name = self._get_name(function.name)
                self._rename_attributes(function.attr)

    def _get_name(self, name: str) -> str:
        if name not in self._known:
            raise _NotCanonicalError(f"the function {name!r}")
        return self._names.setdefault(name, f"{self._prefix}{len(self._names)}")

    def _rename(self, function: Any) -> Any:
        """Returns a function under its new name, with new names in it."""
        renamed = type(function)()
        renamed.CopyFrom(function)
        signature = renamed.signature
        arguments = list(signature.input_arg)
        if renamed.resource_arg_unique_id or any(
            argument.type == tf.resource.as_datatype_enum for argument in arguments
        ):
            raise _NotCanonicalError("a resource that a function takes")
        signature.name = self._names[function.signature.name]
        nodes = _number(
            [*(a.name for a in arguments), *(n.name for n in renamed.node_def)]
        )

        def rename_source(source: str) -> str:
            head, colon, tail = source.removeprefix("^").partition(":")
            return "^" * source.startswith("^") + _find(nodes, head) + colon + tail

        for argument in arguments:
            argument.name = nodes[argument.name]
        for node in renamed.node_def:
            node.name = nodes[node.name]
            _set(node.input, [rename_source(source) for source in node.input])
            self.rename_in(node, nodes)
        if _CHOICE in renamed.attr:
            raise _NotCanonicalError("a function that another may stand for")
        for link in _LINKS:
            renamed.attr.pop(link, None)
        self._rename_attributes(renamed.attr)
        results = [rename_source(renamed.ret[r.name]) for r in signature.output_arg]
        renamed.ret.clear()
        for index, (result, source) in enumerate(
            zip(signature.output_arg, results, strict=True)
        ):
            result.name = f"result{index}"
            renamed.ret[result.name] = source
        for name, source in renamed.control_ret.items():
            renamed.control_ret[name] = _find(nodes, source)
        return renamed


def _number(names: Any) -> dict[str, str]:
    """Returns new names, in order."""
    listed = list(names)
    numbered = {name: f"n{index}" for index, name in enumerate(listed)}
    if len(numbered) < len(listed):
        raise _NotCanonicalError("a name that is given twice")
    return numbered


def _find(nodes: Mapping[str, str], name: str) -> str:
    if name not in nodes:
        raise _NotCanonicalError(f"{name!r}, which is not in it")
    return nodes[name]


def _rename_place(place: bytes, nodes: Mapping[str, str]) -> bytes:
    """Returns the place of a node, which may be said to be where another node is."""
    scheme, at, name = place.decode().partition("@")
    return f"{scheme}{at}{nodes.get(name, name)}".encode()


def _set(field: Any, values: Sequence[Any]) -> None:
    del field[:]
    field.extend(values)
