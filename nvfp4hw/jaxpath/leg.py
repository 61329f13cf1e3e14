"""The six operands of a linear layer's GEMMs, as this path, Transformer Engine/JAX and jax.nn quantize them.

    python -m nvfp4hw.jaxpath.leg [--recipe te]

Each result is held against the oracle: under the preset of the quantizer, and under ``te``, which Transformer Engine's
CUDA kernels follow.  It runs on JAX's default device.  jax.nn has 1x16 blocks and nearest rounding only, whatever the
recipe says; Transformer Engine's random numbers are its own, so its stochastic codes have no ``te`` to be held against.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw import jaxpath, rng
from nvfp4hw.backends import _package, jax_nn, te_jax
from nvfp4hw.jaxpath import stochastic
from nvfp4ref.recipe import GEMMS, Operand, Recipe, recipe

Array = np.ndarray[Any, Any]


class Row(NamedTuple):
    """One operand of one implementation; counts of what differs, None where there is nothing to compare with."""

    implementation: str
    operand: str
    codes: int  # compared
    own: tuple[int, int]  # codes and scale bytes that differ under its own preset
    te: tuple[int, int] | None  # the same under te and the recipe


def layer(seed: int = 0) -> dict[str, Array]:
    """x, w and dy of a layer of 128 tokens, 256 input and 384 output features, bfloat16."""
    random = np.random.default_rng(seed)
    shapes = {"x": (128, 256), "w": (384, 256), "dy": (128, 384)}
    sizes = {"x": 1.0, "w": 1 / 16, "dy": 1 / 128}
    return {
        name: (random.standard_normal(shape) * sizes[name]).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }


def operands(chosen: Recipe) -> Iterator[tuple[str, Operand]]:
    """(name, operand) of the three GEMMs."""
    for gemm in GEMMS:
        for operand in chosen.operands(gemm):
            yield f"{gemm} {operand.tensor}", operand


def compare(chosen: Recipe, tensors: dict[str, Array]) -> Iterator[Row]:
    """Every operand by every implementation that is installed."""
    for name, operand in operands(chosen):
        x = tensors[operand.tensor]
        yield _ours(name, operand, x)
        if te_jax.TransformerEngineJax().availability() is None:
            yield _transformer_engine(name, operand, x)
        if jax_nn.JaxNN().availability() is None:
            yield _jax_nn(name, operand, x)


def _differences(codes: Array, scales: Array, expected: nv.NVFP4Tensor) -> tuple[int, int]:
    return int((codes != expected.codes).sum()), int((scales != expected.scales).sum())


def _ours(name: str, operand: Operand, x: Array) -> Row:
    options, random = operand.options(), None
    if operand.rounding == "stochastic":
        key = jax.random.key(1)
        random = np.asarray(stochastic.words(key, x.shape if operand.axis == -1 else x.shape[::-1]))
        q = jaxpath.quantize(jnp.asarray(x), rbits=key, **options)
    else:
        q = jaxpath.quantize(jnp.asarray(x), **options)
    found = _differences(np.asarray(q.codes), np.asarray(q.scales), nv.quantize(x, rbits=random, **options))
    return Row("jaxpath", name, x.size, found, found)


def _preset(name: str) -> str:
    return f"{name}-gpu" if jax.default_backend() == "gpu" else name


def _transformer_engine(name: str, operand: Operand, x: Array) -> Row:
    te = te_jax._quantizer_module()
    state = np.array([[1, 2, 3, 4]], np.uint32) if operand.rounding == "stochastic" else None
    quantizer = te.NVFP4Quantizer(
        q_dtype=jnp.float4_e2m1fn,
        scaling_mode=te.ScalingMode["NVFP4_1D_SCALING" if operand.block == (1, 16) else "NVFP4_2D_SCALING"],
        q_layout=te.QuantizeLayout["ROWWISE" if operand.axis == -1 else "COLWISE"],
        data_layout="NT",
        use_rht=operand.rht is not None,
        stochastic_rounding_rng_state=None if state is None else jnp.asarray(state),
    )
    found = jax.jit(lambda x: quantizer.quantize(x))(jnp.asarray(x))
    codes, scales = np.asarray(found.data).view(np.uint8), np.asarray(found.scale_inv).view(np.uint8)
    options = {**operand.options(), "arithmetic": _preset("te-jax")}
    if state is not None:
        shape = x.shape if operand.axis == -1 else x.shape[::-1]
        options["rbits"] = rng.jax_uniforms(state, shape)
    own = _differences(codes, scales, nv.quantize(x, **options))
    te_rule = None if state is not None else _differences(codes, scales, nv.quantize(x, **operand.options()))
    return Row(_preset("te-jax"), name, x.size, own, te_rule)


def _jax_nn(name: str, operand: Operand, x: Array) -> Row:
    quantize, config = jax_nn.JaxNN._objects()
    matrix = x if operand.axis == -1 else np.ascontiguousarray(x.T)
    amax = np.array(np.abs(matrix.astype(np.float32)).max(), np.float32)
    global_scale = jnp.asarray(amax.reshape(1)) / 2688
    with _package.quiet():
        codes, scales = jax_nn._jitted(quantize, config)(jnp.asarray(matrix), global_scale)
    codes, scales = np.asarray(codes).view(np.uint8), np.asarray(scales).view(np.uint8)
    own = _differences(codes, scales, nv.quantize(matrix, arithmetic=_preset("jax-nn")))
    stochastic_ = operand.rounding == "stochastic"
    te_rule = None if stochastic_ else _differences(codes, scales, nv.quantize(x, **operand.options()))
    return Row(_preset("jax-nn"), name, x.size, own, te_rule)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'implementation':16}{'operand':12}{'codes':>8}{'own preset':>26}{'te':>26}"]
    for row in sorted(rows, key=lambda row: row.implementation):
        own, te = (f"{c} codes {s} scales" if (c, s) != (0, 0) else "equal" for c, s in (row.own, row.te or (-1, 0)))
        te = "-" if row.te is None else te
        lines.append(f"{row.implementation:16}{row.operand:12}{row.codes:8}{own:>26}{te:>26}")
    return "\n".join(lines)


def main() -> int:
    """Print the table; 1 when a result differs from what its preset says."""
    parser = argparse.ArgumentParser(description="The six operands of a linear layer, by every JAX quantizer.")
    parser.add_argument("--recipe", default="te", choices=sorted(nv.recipe.RECIPES))
    rows = list(compare(recipe(parser.parse_args().recipe), layer()))
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print(table(rows))
    return int(any(row.own != (0, 0) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
