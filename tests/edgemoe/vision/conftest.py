"""A small model that takes pictures, with its store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from picture_models import GREEDY, TEMPLATE, opened, picture_model
from transformers import GenerationConfig

from edgemoe.api.model import Model
from edgemoe.engine.sampling import Sampling
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A checkpoint whose first layers' results get further rows of pictures."""
    return picture_model("qwen3_vl_moe", tmp_path_factory.mktemp("pictures") / "model")


@pytest.fixture(scope="session")
def store(source: Path) -> Path:
    """Its store."""
    made = source.parent / "store"
    convert_checkpoint(source, made, max_level=8, layout="auto", dense_bits=16)
    return made


@pytest.fixture(scope="module")
def model(store: Path) -> Iterator[Model]:
    """A model that keeps the KV of ended requests, with greedy answers."""
    with opened(store) as engine:
        tokenizer = load_tokenizer(store)
        tokenizer.chat_template = TEMPLATE
        sampling = Sampling.of_model(GenerationConfig(), frozenset(), temperature=0, **GREEDY)
        with Model(engine, tokenizer, sampling, keep=True) as made:
            yield made
