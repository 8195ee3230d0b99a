"""Vectors of the mock engine."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_es.config.text_checks import check_model_type, model_type_of
from dynamo_es.engines.mock.embedding import embed_request, is_embedding_request
from dynamo_es.errors import InvalidArgument


def test_equal_texts_have_equal_vectors_of_length_one_and_others_are_nearer_the_more_they_share() -> None:
    lists = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 9], [7, 8, 9, 10]]
    answer = embed_request({"token_ids": lists}, 64)
    vectors = np.asarray(answer["embeddings"])
    assert vectors.shape == (4, 64)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert (vectors[0] == vectors[1]).all()
    near, far = vectors[0] @ vectors[2], vectors[0] @ vectors[3]
    assert near > 0.6 > 0.3 > far
    assert (answer["prompt_tokens"], answer["total_tokens"]) == (16, 16)


def test_vectors_are_the_same_on_every_machine() -> None:
    vector = embed_request({"token_ids": [[1]]}, 4)["embeddings"][0]
    assert vector == pytest.approx(VECTOR_OF_ONE, abs=1e-12)


VECTOR_OF_ONE = [-0.31139406918341184, -0.02476781697760696, 0.40624914501246534, -0.8587094509181794]


def test_fewer_dimensions_are_the_first_ones() -> None:
    whole = embed_request({"token_ids": [[1, 2]]}, 8)["embeddings"][0]
    short = embed_request({"token_ids": [[1, 2]], "dimensions": 3}, 8)["embeddings"][0]
    assert np.asarray(short) / short[0] == pytest.approx(np.asarray(whole[:3]) / whole[0])
    for dimensions in (0, 9, "3"):
        with pytest.raises(InvalidArgument, match="between 1 and 8"):
            embed_request({"token_ids": [[1]], "dimensions": dimensions}, 8)


def test_empty_input_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="input 1 is empty"):
        embed_request({"token_ids": [[1], []]}, 8)


def test_lists_of_ids_are_requests_for_embeddings() -> None:
    assert is_embedding_request({"token_ids": [[1]]})
    for token_ids in ([1], [], None, "x", [[1], 2]):
        assert not is_embedding_request({"token_ids": token_ids})


def test_model_types_are_named_in_any_order_and_case() -> None:
    assert model_type_of("embedding") == "Embedding"
    assert model_type_of("Embedding | chat") == "Chat | Embedding"
    assert model_type_of("completions,CHAT") == "Chat | Completions"
    for text in ("", "chat,", "classify", "chat embedding"):
        with pytest.raises(ValueError, match="expected one or more of Chat, Completions, Embedding"):
            check_model_type(text)
