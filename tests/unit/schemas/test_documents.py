"""The generated documents: current, deterministic, right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import schemas
from schemas.__main__ import main
from schemas.catalog import TOPICS
from schemas.documents import build_documents, build_json_schema, parse_attributes
from schemas.topic import Cleanup, TopicSpec
from tests.unit.schemas.samples import IDS, SAMPLES

FOLDER = Path(schemas.__file__).parent
DOCUMENTS = build_documents(TOPICS)
ASYNCAPI = json.loads(DOCUMENTS["asyncapi.json"])


def validator(spec: TopicSpec) -> jsonschema.Draft202012Validator:
    schema = json.loads(DOCUMENTS[f"json/{spec.name}.schema.json"])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def json_form(value: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(value))


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(document: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#/").split("/"):
        document = document[part]
    return document


def test_committed_documents_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_documents_do_not_depend_on_the_process() -> None:
    program = "from schemas.catalog import TOPICS; from schemas.documents import *; print(build_documents(TOPICS))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=FOLDER.parent,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


def test_check_names_stale_missing_and_left_over_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    (tmp_path / "asyncapi.json").write_text("{}")
    (tmp_path / "json" / "requests.schema.json").unlink()
    (tmp_path / "json" / "gone.schema.json").write_text("{}")
    capsys.readouterr()
    assert main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "stale: schemas/asyncapi.json",
        "stale: schemas/json/gone.schema.json",
        "stale: schemas/json/requests.schema.json",
        "run: python -m schemas",
    ]
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    assert not (tmp_path / "json" / "gone.schema.json").exists()


@pytest.mark.parametrize(("spec", "value"), SAMPLES, ids=IDS)
def test_json_form_of_every_value_is_valid(spec: TopicSpec, value: msgspec.Struct) -> None:
    validator(spec).validate(json_form(value))


@pytest.mark.parametrize(("spec", "value"), SAMPLES, ids=IDS)
def test_what_the_codec_refuses_is_invalid(spec: TopicSpec, value: msgspec.Struct) -> None:
    check = validator(spec)
    form = json_form(value)
    for changed in (
        ["other", *form[1:]],
        [form[0], 2, *form[2:]],
        [form[0], form[1], [], *form[3:]],
        form[:2],
        dict(enumerate(form)),
    ):
        assert not check.is_valid(changed), changed


@pytest.mark.parametrize("spec", TOPICS, ids=lambda spec: spec.name)
def test_every_position_has_the_name_of_its_field(spec: TopicSpec) -> None:
    definitions = build_json_schema(spec)["$defs"]
    kinds = {type(value).__name__: type(value) for owner, value in SAMPLES if owner is spec}
    for name, kind in kinds.items():
        titles = [position["title"] for position in definitions[name]["prefixItems"]]
        assert titles == ["type", *kind.__struct_fields__]
        assert definitions[name]["prefixItems"][1]["const"] == spec.version


def test_descriptions_come_from_the_docstrings() -> None:
    positions = {
        position["title"]: position.get("description")
        for position in build_json_schema(TOPICS[0])["$defs"]["KvEvents"]["prefixItems"]
    }
    assert positions["seq"] == "Dense number of the batch within the incarnation, from 0."
    assert "``" not in "".join(DOCUMENTS.values())


def test_attribute_sections_are_read_with_shared_names_and_continuation_lines() -> None:
    text, fields = parse_attributes("First.\n\nMore.\n\nAttributes:\n    a, b: One\n        two.\n    c: Three: four.")
    assert text == "First.\n\nMore."
    assert fields == {"a": "One two.", "b": "One two.", "c": "Three: four."}


def test_asyncapi_describes_every_topic() -> None:
    assert list(ASYNCAPI["channels"]) == [spec.name for spec in TOPICS]
    for spec in TOPICS:
        channel = ASYNCAPI["channels"][spec.name]
        kafka = channel["bindings"]["kafka"]
        assert channel["address"] == f"{{namespace}}.{spec.name}"
        assert kafka["partitions"] == spec.partitions
        assert kafka["topicConfiguration"]["cleanup.policy"] == [spec.cleanup.value]
        assert ("retention.ms" in kafka["topicConfiguration"]) is (spec.cleanup is Cleanup.RETENTION)
        assert spec.key in channel["description"]


def test_every_reference_leads_somewhere() -> None:
    for name, text in DOCUMENTS.items():
        document = json.loads(text)
        for reference in references(document):
            file, _, pointer = reference.partition("#")
            target = json.loads(DOCUMENTS[file.removeprefix("./")]) if file else document
            assert resolve(target, f"#{pointer}"), (name, reference)


def test_messages_carry_key_header_and_content_type() -> None:
    messages = ASYNCAPI["components"]["messages"]
    assert len(messages) == len({type(value) for _, value in SAMPLES})
    for spec, value in SAMPLES:
        message = messages[type(value).__struct_config__.tag]
        assert message["contentType"] == "application/msgpack"
        assert message["headers"]["properties"]["schema"]["const"] == f"{spec.name}/{spec.version}"
        assert message["payload"]["schema"]["$ref"].endswith(f"$defs/{type(value).__name__}")
        assert spec.key in message["bindings"]["kafka"]["key"]["description"]
