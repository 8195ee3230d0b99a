"""Messages of the KServe v2 protocol (package ``inference``), made from a table instead of generated code.

Field names and numbers are those of the published protocol; of Triton's ``ModelConfig`` only what is answered with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = "inference.GRPCInferenceService"
_NAMED = "string name = 1; string version = 2"
_TENSOR = "string name = 1; string datatype = 2; repeated int64 shape = 3; map InferParameter parameters = 4"
_HEAD = "string model_name = 1; string model_version = 2; string id = 3; map InferParameter parameters = 4"
_TABLE: Mapping[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "bool ready = 1",
    "ModelMetadataRequest": _NAMED,
    "TensorMetadata": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3; "
    "repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5",
    "InferParameter": "oneof bool bool_param = 1; oneof int64 int64_param = 2; oneof string string_param = 3; "
    "oneof double double_param = 4; oneof uint64 uint64_param = 5",
    "InferTensorContents": "repeated bool bool_contents = 1; repeated int32 int_contents = 2; "
    "repeated int64 int64_contents = 3; repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; "
    "repeated float fp32_contents = 6; repeated double fp64_contents = 7; repeated bytes bytes_contents = 8",
    "InferInputTensor": f"{_TENSOR}; InferTensorContents contents = 5",
    "InferRequestedOutputTensor": "string name = 1; map InferParameter parameters = 2",
    "InferOutputTensor": f"{_TENSOR}; InferTensorContents contents = 5",
    "ModelInferRequest": f"{_HEAD}; repeated InferInputTensor inputs = 5; "
    "repeated InferRequestedOutputTensor outputs = 6; repeated bytes raw_input_contents = 7",
    "ModelInferResponse": f"{_HEAD}; repeated InferOutputTensor outputs = 5; repeated bytes raw_output_contents = 6",
    "ModelStreamInferResponse": "string error_message = 1; ModelInferResponse infer_response = 2",
    "ModelConfigRequest": _NAMED,
    "ModelInput": "string name = 1; DataType data_type = 2; repeated int64 dims = 4",
    "ModelOutput": "string name = 1; DataType data_type = 2; repeated int64 dims = 3",
    "ModelConfig": "string name = 1; string platform = 2; int32 max_batch_size = 4; repeated ModelInput input = 5; "
    "repeated ModelOutput output = 6; string backend = 17",
    "ModelConfigResponse": "ModelConfig config = 1",
}
_DATA_TYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING", "BF16",
)  # fmt: skip
_SCALARS = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
}  # fmt: skip
_MESSAGE, _ENUM = 11, 14
_OPTIONAL, _REPEATED = 1, 3


class Messages:
    """The classes of all messages, by attribute. Each instance has a pool of its own."""

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto(name="kserve_v2.proto", package=PACKAGE, syntax="proto3")
        kinds = file.enum_type.add(name="DataType")
        for number, name in enumerate(_DATA_TYPES):
            kinds.value.add(name=f"TYPE_{name}", number=number)
        for name, fields in _TABLE.items():
            _describe(file.message_type.add(name=name), fields)
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(file.SerializeToString())
        self._classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _TABLE
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return self._classes[name]
        except KeyError:
            raise AttributeError(name) from None


def _describe(message: Any, fields: str) -> None:
    for line in filter(None, fields.split("; ")):
        *label, kind, name, _, number = line.split(" ")
        if label == ["map"]:
            _add_map(message, kind, name, int(number))
            continue
        field = message.field.add(name=name, number=int(number), label=_OPTIONAL)
        _set_kind(field, kind)
        if label == ["repeated"]:
            field.label = _REPEATED
        elif label == ["oneof"]:
            if not message.oneof_decl:
                message.oneof_decl.add(name="parameter_choice")
            field.oneof_index = 0


def _add_map(message: Any, kind: str, name: str, number: int) -> None:
    entry_name = f"{name.capitalize()}Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    _set_kind(entry.field.add(name="key", number=1, label=_OPTIONAL), "string")
    _set_kind(entry.field.add(name="value", number=2, label=_OPTIONAL), kind)
    field = message.field.add(name=name, number=number, label=_REPEATED, type=_MESSAGE)
    field.type_name = f".{PACKAGE}.{message.name}.{entry_name}"


def _set_kind(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _ENUM if kind == "DataType" else _MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
