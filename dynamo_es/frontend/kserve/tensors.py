"""Tensors of the protocol as engines get and give them (spec/services e.3). Pure, but for the messages that it fills.

An engine's tensor is ``{"metadata": {"name", "data_type", "shape"}, "data": {"data_type", "values"}}``, its parameters
are ``{name: {kind: value}}``. Raw contents are little-endian and packed; bytes have a length of four bytes before them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_ELEMENTS = 2**31
_LENGTH = struct.Struct("<I")
_BYTES = "BYTES"


class Refused(ValueError):
    """The request is not what the protocol asks for; the text is the client's."""


class Kind(NamedTuple):
    """A type of elements: its name for engines, its member of typed contents, its ``struct`` code (None: bytes)."""

    name: str
    contents: str
    code: str | None


KINDS: Mapping[str, Kind] = {
    "BOOL": Kind("Bool", "bool_contents", "?"),
    "UINT8": Kind("Uint8", "uint_contents", "B"),
    "UINT16": Kind("Uint16", "uint_contents", "H"),
    "UINT32": Kind("Uint32", "uint_contents", "I"),
    "UINT64": Kind("Uint64", "uint64_contents", "Q"),
    "INT8": Kind("Int8", "int_contents", "b"),
    "INT16": Kind("Int16", "int_contents", "h"),
    "INT32": Kind("Int32", "int_contents", "i"),
    "INT64": Kind("Int64", "int64_contents", "q"),
    "FP32": Kind("Float32", "fp32_contents", "f"),
    "FP64": Kind("Float64", "fp64_contents", "d"),
    _BYTES: Kind("Bytes", "bytes_contents", None),
}
PROTOCOL_NAMES: Mapping[str, str] = {kind.name: name for name, kind in KINDS.items()}
"""Names of the protocol by those of engines."""
_NARROW = ("B", "H", "b", "h")
_PARAMETERS = ("bool", "int64", "string", "double", "uint64")


def read_request(request: Any) -> dict[str, Any]:
    """What a tensor engine gets. Raises ``Refused``."""
    _check_raw(request)
    raw: Sequence[bytes] = request.raw_input_contents
    tensors = []
    for place, tensor in enumerate(request.inputs):
        count, kind = _size_of(tensor.shape), _kind_of(tensor.datatype)
        values = read_raw(tensor.name, kind, raw[place]) if raw else _typed(tensor.contents, kind)
        if len(values) != count:
            raise Refused(f"tensors[{place}].shape: shape implies {count} elements but data has {len(values)}")
        tensors.append(
            {
                "metadata": {"name": tensor.name, "data_type": kind.name, "shape": list(tensor.shape)},
                "data": {"data_type": kind.name, "values": [list(v) for v in values] if kind.code is None else values},
            }
        )
    parameters = read_parameters(request.parameters)
    return {
        "id": request.id or None,
        "model": request.model_name,
        "tensors": tensors,
        **({"parameters": parameters} if parameters else {}),
    }


def read_inputs(request: Any) -> Iterator[tuple[str, str, list[int], list[Any]]]:
    """Name, type, shape and elements of each input, however its contents are told. Raises ``Refused``."""
    _check_raw(request)
    raw: Sequence[bytes] = request.raw_input_contents
    for place, tensor in enumerate(request.inputs):
        kind = _kind_of(tensor.datatype)
        values = read_raw(tensor.name, kind, raw[place]) if raw else _typed(tensor.contents, kind)
        yield tensor.name, tensor.datatype, list(tensor.shape), values


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as engines get them."""
    found = {}
    for name, value in parameters.items():
        chosen = value.WhichOneof("parameter_choice")
        if chosen is not None:
            found[name] = {chosen.removesuffix("_param"): getattr(value, chosen)}
    return found


def fill_response(response: Any, request: Any, frame: Any) -> None:
    """Put an engine's answer into a ``ModelInferResponse``, with raw contents if the request had such.

    Raises:
        Refused: It is none; the text names what.
    """
    if not isinstance(frame, Mapping) or not isinstance(frame.get("tensors", []), Sequence):
        raise Refused("the engine's answer has no tensors")
    response.model_name = str(frame.get("model") or request.model_name)
    response.model_version = "1"
    response.id = request.id
    for name, value in (frame.get("parameters") or {}).items():
        _fill_parameter(response.parameters[name], value)
    for tensor in frame.get("tensors", []):
        _fill_tensor(response, tensor, as_raw=bool(request.raw_input_contents))


def read_raw(name: str, kind: Kind, raw: bytes) -> list[Any]:
    """Elements of raw contents. Raises ``Refused``."""
    if kind.code is not None:
        size = struct.calcsize(f"<{kind.code}")
        if len(raw) % size:
            raise Refused(f"Raw input length must be a multiple of {size}")
        return list(struct.unpack(f"<{len(raw) // size}{kind.code}", raw))
    values, at = [], 0
    while at < len(raw):
        end = at + _LENGTH.size
        length = _LENGTH.unpack(raw[at:end])[0] if end <= len(raw) else len(raw)
        if end + length > len(raw):
            raise Refused(f"Invalid length-prefixed BYTES input for '{name}', length exceeds raw input size")
        values.append(raw[end : end + length])
        at = end + length
    return values


def write_raw(kind: Kind, values: Sequence[Any]) -> bytes:
    """Elements as raw contents. Raises ``struct.error``."""
    if kind.code is not None:
        return struct.pack(f"<{len(values)}{kind.code}", *values)
    return b"".join(_LENGTH.pack(len(value)) + bytes(value) for value in values)


def _fill_tensor(response: Any, tensor: Any, *, as_raw: bool) -> None:
    try:
        about, data = tensor["metadata"], tensor["data"]
        kind = KINDS[PROTOCOL_NAMES[about["data_type"]]]
        values = [bytes(value) for value in data["values"]] if kind.code is None else data["values"]
        told = response.outputs.add(name=about["name"], datatype=PROTOCOL_NAMES[kind.name], shape=about["shape"])
        if as_raw:
            response.raw_output_contents.append(write_raw(kind, values))
        else:
            getattr(told.contents, kind.contents).extend(values)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise Refused(f"the engine's answer has a tensor that is none ({type(error).__name__})") from error


def _fill_parameter(parameter: Any, value: Any) -> None:
    try:
        ((kind, content),) = value.items()
        if kind not in _PARAMETERS:
            raise ValueError(kind)
        setattr(parameter, f"{kind}_param", content)
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused("the engine's answer has a parameter that is none") from error


def _check_raw(request: Any) -> None:
    raw = request.raw_input_contents
    if raw and (len(raw) != len(request.inputs) or any(tensor.HasField("contents") for tensor in request.inputs)):
        raise Refused("`raw_input_contents` must be used for all inputs")


def _kind_of(datatype: str) -> Kind:
    kind = KINDS.get(datatype)
    if kind is None:
        raise Refused("Invalid data type")
    return kind


def _size_of(shape: Sequence[int]) -> int:
    negative = next((size for size in shape if size < 0), None)
    if negative is not None:
        raise Refused(f"Shape contains negative dimension: {negative}")
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        raise Refused(f"Shape has more than {MAX_ELEMENTS} elements")
    return count


def _typed(contents: Any, kind: Kind) -> list[Any]:
    values = list(getattr(contents, kind.contents))
    if kind.code in _NARROW:
        # What does not fit wraps, as in Dynamo.
        width = 8 * struct.calcsize(kind.code)
        signed = kind.code.islower()
        half = 1 << (width - 1)
        wrapped = [value & ((1 << width) - 1) for value in values]
        return [value - (1 << width) if signed and value >= half else value for value in wrapped]
    return values
