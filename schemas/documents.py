"""JSON Schema and AsyncAPI documents of all topics, for people who use them in other languages. Pure: builds text.

The structure comes from msgspec's schema generator, which knows what a decoder accepts. Values are arrays, so each
position gets its field's name as title and the field's sentence from the Struct's docstring as description.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from schemas.topic import Cleanup, TopicSpec

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_FORMAT = "application/schema+json;version=draft-2020-12"
CONTENT_TYPE = "application/msgpack"
ASYNCAPI_FILE = "asyncapi.json"
KAFKA_BINDING_VERSION = "0.5.0"
_ATTRIBUTE = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.+)$")

GUIDE = """\
What a reader or writer in another language needs to know.

**Topics.** A topic's full name is `<namespace>.<name>`, by default `dynamo.kv-events` and so on. Partition counts are \
fixed for the life of a topic. Writers choose the partition by Kafka's default partitioner (murmur2 of the key, \
positive, modulo the count), so every record of a key is in one partition, in order. Read partitions from a stored \
offset (`assign`, no consumer group) to hold a whole view.

**Values.** MessagePack. A value is an array: item 0 is the type's tag (a string), item 1 the layout version, then the \
fields in the order of `prefixItems`; `title` is the field's name. Structs inside a value follow the same form, with \
tag and without version, or without either where the schema shows no tag. Trailing fields with a default may be \
missing; ignore items after those you know. Fields that the schema shows as base64 strings are MessagePack `bin` on \
the wire: base64 is only their form in JSON. None in a description is MessagePack `nil`. Ids, hashes, incarnations and \
sequence numbers are unsigned 64-bit integers and exceed 2^53: decode them as such (BigInt in JavaScript).

**Header.** `schema` holds `<name>/<version>` in ASCII. A record without it is judged by its value alone. A reader \
that meets another version must not guess: put the record aside and go on.

**Packed columns.** A column of u64 is a `bin` of little-endian unsigned 64-bit integers, 8 bytes a value; columns \
that stand side by side have the same length.

**Hashes.** Tokens hash of a block: XXH3-64 over its token ids as little-endian u32, followed by its multimodal \
hashes sorted as little-endian u64; the seed is 1337 + XXH3-64(LoRA name, seed 0) + XXH3-64(cache namespace, seed 1), \
modulo 2^64, an absent or empty name adding 0. Sequence hash: for the first block its tokens hash, then XXH3-64 over \
(previous sequence hash, tokens hash), both little-endian u64, seed 1337.

**Refused records.** A value that does not decode, has another version or is over the topic's bound is copied to \
`dead-letters` with its reason, and stops nobody.

**Compacted topics.** A record without a value (null) deletes its key.
"""


def build_documents(topics: Sequence[TopicSpec]) -> dict[str, str]:
    """File name (relative, with ``/``) to text of every document; the same input gives the same bytes."""
    documents = {_schema_file(spec): _to_text(build_json_schema(spec)) for spec in topics}
    documents[ASYNCAPI_FILE] = _to_text(build_asyncapi(topics))
    return documents


def build_json_schema(spec: TopicSpec) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one topic's values, in their JSON form."""
    (root,), definitions = msgspec.json.schema_components([spec.value], ref_template="#/$defs/{name}")
    structs = {struct.__name__: struct for struct in _structs_of(spec.value)}
    return {
        "$schema": JSON_SCHEMA_DIALECT,
        "$id": f"urn:dynamo-es:{spec.name}:{spec.version}",
        "title": spec.name,
        "description": _markdown(f"{spec.description} Version {spec.version}."),
        **root,
        "$defs": {name: _describe(definitions[name], structs[name], spec) for name in sorted(definitions)},
    }


def build_asyncapi(topics: Sequence[TopicSpec]) -> dict[str, Any]:
    """AsyncAPI 3.0 document: a channel for each topic, a message for each value type."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "dynamo-es topics",
            "version": str(max(spec.version for spec in topics)),
            "description": GUIDE,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {spec.name: _channel(spec) for spec in topics},
        "operations": {
            f"{action}-{spec.name}": _operation(action, spec) for spec in topics for action in ("send", "receive")
        },
        "components": {
            "messages": {_tag(struct): _message(struct, spec) for spec in topics for struct in _members(spec.value)}
        },
    }


def parse_attributes(docstring: str) -> tuple[str, dict[str, str]]:
    """A Struct's docstring without its ``Attributes:`` section, and that section by field name."""
    text, _, section = docstring.partition("\nAttributes:\n")
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        found = _ATTRIBUTE.match(line)
        if found:
            names = found["names"].split(", ")
            fields.update(dict.fromkeys(names, found["text"]))
        else:
            fields.update({name: f"{fields[name]} {line.strip()}" for name in names if line.strip()})
    return text.strip(), fields


def _schema_file(spec: TopicSpec) -> str:
    return f"json/{spec.name}.schema.json"


def _to_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _members(value: Any) -> tuple[type[msgspec.Struct], ...]:
    """The Structs that a record of the topic may be."""
    return get_args(value) or (value,)


def _structs_of(value: Any) -> Iterator[type[msgspec.Struct]]:
    """All Structs that a type mentions, at any depth."""
    if inspect.isclass(value) and issubclass(value, msgspec.Struct):
        yield value
        for field in msgspec.structs.fields(value):
            yield from _structs_of(field.type)
    else:
        for argument in get_args(value):
            yield from _structs_of(argument)


def _tag(struct: type[msgspec.Struct]) -> str:
    return str(struct.__struct_config__.tag)


def _describe(schema: Mapping[str, Any], struct: type[msgspec.Struct], spec: TopicSpec) -> dict[str, Any]:
    """Name and explain each position of an array Struct."""
    text, attributes = parse_attributes(inspect.getdoc(struct) or "")
    tagged = struct.__struct_config__.tag is not None
    names = (["type"] if tagged else []) + list(struct.__struct_fields__)
    positions: list[dict[str, Any]] = []
    for name, position in zip(names, schema["prefixItems"], strict=True):
        described = {"title": name, **position}
        if tagged and not positions:
            described = {"title": name, "const": _tag(struct)}
        elif name == "version":
            described.update({"const": spec.version, "description": "Layout version of the topic's values."})
        if name in attributes:
            described["description"] = _markdown(attributes[name])
        positions.append(described)
    return {
        "title": schema["title"],
        "description": _markdown(text),
        "type": "array",
        "prefixItems": positions,
        "minItems": schema["minItems"],
    }


def _channel(spec: TopicSpec) -> dict[str, Any]:
    module_text = inspect.getdoc(sys.modules[_members(spec.value)[0].__module__]) or ""
    configuration: dict[str, Any] = {"cleanup.policy": [spec.cleanup.value]}
    if spec.cleanup is Cleanup.RETENTION:
        configuration["retention.ms"] = -1 if spec.retention_ms is None else spec.retention_ms
    return {
        "address": f"{{namespace}}.{spec.name}",
        "title": spec.name,
        "summary": spec.description,
        "description": _markdown(f"{module_text}\n\nKey: `{spec.key}`. {_kept(spec)} {_bound(spec)}"),
        "parameters": {"namespace": {"default": "dynamo", "description": "Prefix of all topic names."}},
        "messages": {
            _tag(struct): {"$ref": f"#/components/messages/{_tag(struct)}"} for struct in _members(spec.value)
        },
        "bindings": {
            "kafka": {
                "partitions": spec.partitions,
                "topicConfiguration": configuration,
                "bindingVersion": KAFKA_BINDING_VERSION,
            }
        },
    }


def _kept(spec: TopicSpec) -> str:
    if spec.cleanup is Cleanup.COMPACTION:
        return "Compacted: the newest record of each key is kept; a null value deletes the key."
    kept = "Kept for ever." if spec.retention_ms is None else f"Kept for {spec.retention_ms / 3_600_000:g} hours."
    if spec.trim_needs_snapshot:
        kept += " The embedded log trims it only below the newest snapshot."
    return kept


def _bound(spec: TopicSpec) -> str:
    return f"A value has at most {spec.max_value_bytes:,} bytes."


def _operation(action: str, spec: TopicSpec) -> dict[str, Any]:
    verb = "appends to" if action == "send" else "reads"
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{spec.name}"},
        "summary": f"dynamo-es {verb} {spec.name}.",
        "messages": [{"$ref": f"#/channels/{spec.name}/messages/{_tag(struct)}"} for struct in _members(spec.value)],
    }


def _message(struct: type[msgspec.Struct], spec: TopicSpec) -> dict[str, Any]:
    text, _ = parse_attributes(inspect.getdoc(struct) or "")
    return {
        "name": _tag(struct),
        "title": struct.__name__,
        "summary": _markdown(text.partition("\n")[0]),
        "contentType": CONTENT_TYPE,
        "headers": {
            "type": "object",
            "properties": {
                "schema": {"type": "string", "const": f"{spec.name}/{spec.version}", "description": "ASCII bytes."}
            },
        },
        "payload": {
            "schemaFormat": SCHEMA_FORMAT,
            "schema": {"$ref": f"./{_schema_file(spec)}#/$defs/{struct.__name__}"},
        },
        "bindings": {
            "kafka": {
                "key": {"type": "string", "description": f"UTF-8: {spec.key}"},
                "bindingVersion": KAFKA_BINDING_VERSION,
            }
        },
    }
