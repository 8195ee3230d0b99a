"""Checking what a tensor model says of its inputs and outputs (spec/services d.4, e.3). Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from dynamo_es.models.errors import ModelError

DATA_TYPES = (
    "Bool", "Uint8", "Uint16", "Uint32", "Uint64", "Int8", "Int16", "Int32", "Int64", "Float32", "Float64", "Bytes",
)  # fmt: skip
_REQUIRED = ("name", "inputs", "outputs")
_FIELDS = (*_REQUIRED, "triton_model_config")
_TENSOR_FIELDS = ("name", "data_type", "shape")


def check_tensor_config(value: Any) -> dict[str, Any]:
    """A copy of ``{"name", "inputs": [{"name", "data_type", "shape", ...}], "outputs": [...]}``.

    Raises:
        TypeError: No dict.
        ModelError: Something is missing, unknown or of the wrong type, or a data type is none.
    """
    if not isinstance(value, dict):
        raise TypeError(
            f"argument 'tensor_model_config': '{type(value).__name__}' object cannot be converted to 'PyDict'"
        )
    for name in value:
        if name not in _FIELDS:
            raise _refuse(f"unknown field `{name}`, expected one of {', '.join(f'`{known}`' for known in _FIELDS)}")
    _require(value, _REQUIRED)
    _check_kind(value["name"], str, "PyString")
    for part in ("inputs", "outputs"):
        _check_kind(value[part], list | tuple, "Sequence")
        for tensor in value[part]:
            _check_tensor(tensor)
    return dict(value)


def _check_tensor(tensor: Any) -> None:
    _check_kind(tensor, dict, "Mapping")
    _require(tensor, _TENSOR_FIELDS)
    _check_kind(tensor["name"], str, "PyString")
    if tensor["data_type"] not in DATA_TYPES:
        listed = ", ".join(f"`{name}`" for name in DATA_TYPES)
        raise _refuse(f"unknown variant `{tensor['data_type']}`, expected one of {listed}")
    _check_kind(tensor["shape"], list | tuple, "Sequence")
    for size in tensor["shape"]:
        try:
            operator.index(size)
        except TypeError as error:
            raise _refuse(f"TypeError: {error}") from error


def _check_kind(value: Any, kind: Any, rust_name: str) -> None:
    if not isinstance(value, kind):
        raise _refuse(f"unexpected type: '{type(value).__name__}' object cannot be converted to '{rust_name}'")


def _require(value: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in value:
            raise _refuse(f"missing field `{name}`")


def _refuse(detail: str) -> ModelError:
    return ModelError(f"Failed to convert tensor_model_config: {detail}")
