"""Pictures on a real GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from picture_models import SMALL, divergences, picture_model

from edgemoe.api.pictures import ModelPictures
from edgemoe.errors import UserError
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.store.dense import VISION_NAME

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("model_type", "tokens"), [("qwen3_vl_moe", [6, 3]), ("qwen3_5_moe", [6, 3]), ("glm4v_moe", [6, 4])]
)
def test_logits_are_transformers(tmp_path, model_type, tokens):
    """The tower, the prompt and the new tokens after it, as on the CPU."""
    from edgemoe.machine.cuda import CudaDevice

    source = picture_model(model_type, tmp_path / "model")
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    own, black = divergences(source, tmp_path / "store", SMALL, tokens, CudaDevice())
    assert float(own.median()) < 0.0005
    assert float(black.mean()) > 0.01


def test_pictures_that_attend_both_ways_are_refused(tmp_path):
    """By the model's name; the plan leaves their memory to experts."""
    from edgemoe.machine.cuda import CudaDevice

    source = picture_model("gemma4", tmp_path / "model")
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    found = StoreModel.open(tmp_path / "store", CudaDevice()).with_vision()
    assert VISION_NAME in found.manifest.files
    assert found.shape.vision is None
    with pytest.raises(UserError, match="the compiled kernel on a CPU, for pictures of gemma4, got a GPU"):
        ModelPictures(found, 0).split([{"role": "user", "content": [{"type": "image", "image": b""}]}])
