from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.models.card_json import slug
from dynamo_es.models.deployment_card import ModelCardInstanceId, ModelDeploymentCard
from dynamo_es.models.errors import ModelError
from dynamo_es.models.kinds import ModelType
from schemas.registry import ModelCard

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/services/mdc_and_taints.json").read_text())
REGISTERED = json.loads((Path(__file__).parents[2] / "data/golden/services/register_model.json").read_text())["cases"]
CARDS = {
    case["case"]: file["card_json"] for case in REGISTERED for file in case["discovery_files"].values() if file
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_the_references_cards_come_back_as_they_were(name: str) -> None:
    card = ModelDeploymentCard.from_json_str(json.dumps(CARDS[name]))
    assert json.loads(card.to_json_str()) == CARDS[name]
    assert ModelDeploymentCard.from_json_str(card.to_json_str()) == card
    assert card.name() == CARDS[name]["display_name"]
    assert card.runtime_config() == CARDS[name]["runtime_config"]


def test_accessors() -> None:
    recorded = GOLDEN["mdc_accessors"]
    card = ModelDeploymentCard.from_json_str(json.dumps(CARDS["basic"]))
    assert str(card.model_type()) == recorded["mt"]
    assert card.model_type() == ModelType.Chat | ModelType.Completions
    assert repr(card.source_path()) == recorded["sp"]["ok"]
    assert card.name() == recorded["name"]
    shape = recorded["ld"]["ok"].strip("'").replace("$HOME", str(Path.home())).split("/")
    assert card.local_dir().split("/")[:-1] == shape[:-1]
    assert len(card.local_dir().split("/")[-1]) == 64


@pytest.mark.parametrize(("field", "result"), GOLDEN["missing_field_errors"].items())
def test_members_that_every_card_has(field: str, result: dict[str, str]) -> None:
    text = json.dumps({name: value for name, value in CARDS["full"].items() if name != field})
    if "ok" in result:
        assert ModelDeploymentCard.from_json_str(text).name() == "m"
        return
    with pytest.raises(ModelError) as caught:
        ModelDeploymentCard.from_json_str(text)
    assert str(caught.value).split(" at line")[0] == result["msg"].split(" at line")[0]
    assert str(caught.value).endswith(f" at line 1 column {len(text)}")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", GOLDEN["mdc_accessors"]["bad"]["msg"]),
        ("nonsense", "expected ident at line 1 column 2"),
        ("x", GOLDEN["mdc_accessors"]["bad2"]["msg"]),
        ("[]", "a model card is a JSON object"),
        ("[" * 50_000, None),
        (json.dumps(CARDS["basic"] | {"model_type": "Chit"}), None),
        (json.dumps(CARDS["basic"] | {"model_type": 5}), None),
    ],
    ids=["empty", "nonsense", "x", "list", "deep", "type", "number"],
)
def test_texts_that_are_no_card(text: str, error: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        ModelDeploymentCard.from_json_str(text)
    assert error is None or str(caught.value) == error


def test_a_slug_cannot_leave_its_folder() -> None:
    text = json.dumps(CARDS["basic"] | {"slug": "../../etc"})
    assert "/by-slug/etc/" in ModelDeploymentCard.from_json_str(text).local_dir()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Org/My Model.v1", "org_my_model_v1"), ("/abs/path", "abs_path"), ("é-_", "_-_"), ("", "")],
)
def test_slugs(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_nobody_constructs_them_and_they_name_their_worker() -> None:
    for kind in (ModelDeploymentCard, ModelCardInstanceId):
        with pytest.raises(TypeError, match="No constructor defined"):
            kind()
    values: dict[str, Any] = dict(zip(ModelCard.__struct_fields__, (1, "n", "c", "e", 7, 8, ""), strict=False))
    card = ModelCard(
        **values, display_name="m", source_path="", model_input="Text", model_type="Images",
        worker_type="aggregated", needs=[], context_length=0, kv_cache_block_size=0,
    )  # fmt: skip
    assert ModelCardInstanceId.of(card).triple() == ("n", "c", "e")
    assert ModelCardInstanceId.of(card) == ModelCardInstanceId.of(card)
    assert ModelDeploymentCard.of(card).source_path() == "m"
