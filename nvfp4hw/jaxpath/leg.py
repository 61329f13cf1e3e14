"""The three GEMMs of a linear layer: operands and results of this path, Transformer Engine/JAX and jax.nn.

    python -m nvfp4hw.jaxpath.leg [--recipe te | all]

Each operand is held against the oracle twice: under the preset of its quantizer, and under ``te`` and the recipe,
which Transformer Engine's CUDA kernels follow.  Random numbers are each quantizer's own, so of a stochastic operand
``te`` has the scales only.  A result is held against the exact product of the same operands, see ``bound``.

What runs, on JAX's default device:

* ``jaxpath``: all of it.
* ``te-jax``: Transformer Engine's pure-JAX quantizer; it knows neither 4over6 nor amaxes of rows.
* ``te-jax-cuda``: its custom calls, where they are built and the GPU has the instructions.
* ``jax-nn``: the quantizer of ``jax.nn.scaled_dot_general``, 1x16 and nearest whatever the recipe says, on every
  operand; the call itself on those of fprop, on a CPU from JAX 0.11.  Its own gradient multiplies without quantizing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw import jaxpath, rng
from nvfp4hw.backends import _package, jax_nn, te_jax
from nvfp4hw.backends.base import Case, Outputs, Refused
from nvfp4hw.jaxpath import stochastic
from nvfp4ref.recipe import GEMMS, Operand, Recipe, recipe
from nvfp4ref.streams import dispatch

Array = np.ndarray[Any, Any]
ALL = ("te", "te_nvfp4_no_rht", "four-over-six", "row-scaled")  # the others give some of these operands


class Counts(NamedTuple):
    """How many codes and scale bytes differ; codes None where they cannot be compared."""

    codes: int | None
    scales: int

    def __str__(self) -> str:
        if not self.scales and not self.codes:
            return "equal" if self.codes == 0 else "scales equal"
        return f"{'-' if self.codes is None else self.codes} codes {self.scales} scales"


class Row(NamedTuple):
    """One operand as one implementation quantizes it, against its own preset and against ``te``."""

    implementation: str
    operand: str
    elements: int
    own: Counts
    te: Counts

    @property
    def right(self) -> bool:
        return self.own == (0, 0)


class Result(NamedTuple):
    """One float32 GEMM as one implementation computes it, against the exact one.

    Attributes:
        different: elements that are not the exact sum, rounded once and scaled in the same order.
        beyond: elements beyond the bound.
        worst: the largest error as a share of the bound.
    """

    implementation: str
    gemm: str
    elements: int
    different: int
    beyond: int
    worst: float

    @property
    def right(self) -> bool:
        return self.beyond == 0


class NotRun(NamedTuple):
    """What could not be run, and why."""

    implementation: str
    reason: str

    @property
    def right(self) -> bool:
        return True


Found = Row | Result | NotRun


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


def compare(chosen: Recipe, tensors: dict[str, Array]) -> Iterator[Found]:
    """Every operand and result by every implementation, or why it did not run."""
    for run in (_ours, _transformer_engine, _custom_calls, _jax_nn):
        yield from run(chosen, tensors)


def _differences(codes: Array, scales: Array, expected: nv.NVFP4Tensor) -> Counts:
    return Counts(int((codes != expected.codes).sum()), int((scales != expected.scales).sum()))


def _scales_only(scales: Array, x: Array, operand: Operand) -> Counts:
    """The scales do not depend on the random numbers."""
    expected = nv.quantize(x, **operand.options() | {"rounding": "nearest-even"})
    return Counts(None, int((scales != expected.scales).sum()))


def bound(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor) -> Array:
    """What a float32 result of a·bᵀ may be off: (K + 8)·2^-23·|a|·|b|ᵀ, float64.

    Products of operands are exact in float32, so K additions in any order, each rounded or cut off, lose no more than a
    unit in the last place of the sum of magnitudes each; the tensor scales are less than eight more roundings.
    """
    size_a, size_b = (np.abs(nv.dequantize(q).astype(np.float64)) for q in (a, b))
    limit: Array = (a.shape[-1] + 8) * 2.0**-23 * (size_a @ size_b.T)
    return limit


def _result(name: str, gemm: str, y: Any, a: nv.NVFP4Tensor, b: nv.NVFP4Tensor, alpha_form: str) -> Result:
    found, exact = np.asarray(y), nv.matmul(a, b, model="exact", alpha_form=alpha_form)
    error, limit = np.abs(found.astype(np.float64) - exact), bound(a, b)
    beyond = ~(error <= limit)  # NaN too
    share = np.divide(error, limit, out=np.zeros_like(limit), where=limit > 0)
    different = int((found.view(np.uint32) != exact.view(np.uint32)).sum())
    return Result(name, gemm, error.size, different, int(beyond.sum()), float(share.max()))


# -- the implementations ---------------------------------------------------------------------------------------


def _ours(chosen: Recipe, tensors: dict[str, Array]) -> Iterator[Found]:
    for gemm in GEMMS:
        made, expected = [], []
        for operand in chosen.operands(gemm):
            x, random, key = tensors[operand.tensor], None, None
            if operand.rounding == "stochastic":
                key = jax.random.key(1)
                shape = (x.shape[0], x.shape[1]) if operand.axis == -1 else (x.shape[1], x.shape[0])
                random = np.asarray(stochastic.words(key, shape))
            made.append(jaxpath.quantize(jnp.asarray(x), rbits=key, **operand.options()))
            expected.append(nv.quantize(x, rbits=random, **operand.options()))
            found = _differences(np.asarray(made[-1].codes), np.asarray(made[-1].scales), expected[-1])
            yield Row("jaxpath", f"{gemm} {operand.tensor}", x.size, found, found)
        yield _result("jaxpath", gemm, jaxpath.matmul(*made), expected[0], expected[1], "pytorch")


def _preset(name: str) -> str:
    return f"{name}-gpu" if jax.default_backend() == "gpu" else name


def _transformer_engine(chosen: Recipe, tensors: dict[str, Array]) -> Iterator[Found]:
    preset = _preset("te-jax")
    if reason := te_jax.TransformerEngineJax().availability():
        yield NotRun(preset, reason)
        return
    for name, operand in operands(chosen):
        x, random = tensors[operand.tensor], None
        state = np.array([[1, 2, 3, 4]], np.uint32) if operand.rounding == "stochastic" else None
        codes, scales = _of_quantizer(operand, state)(jnp.asarray(x))
        options = operand.options() | {"arithmetic": preset}
        if state is not None:
            random = rng.jax_uniforms(state, x.shape if operand.axis == -1 else x.shape[::-1])
        own = _differences(codes, scales, nv.quantize(x, rbits=random, **options))
        if state is not None:
            yield Row(preset, name, x.size, own, _scales_only(scales, x, operand))
        else:
            yield Row(preset, name, x.size, own, _differences(codes, scales, nv.quantize(x, **operand.options())))


def _of_quantizer(operand: Operand, state: Array | None) -> Callable[[jax.Array], tuple[Array, Array]]:
    """x → (codes, scale bytes) by Transformer Engine's pure-JAX quantizer, jitted."""
    te = te_jax._quantizer_module()
    quantizer = te.NVFP4Quantizer(
        q_dtype=jnp.float4_e2m1fn,
        scaling_mode=te.ScalingMode["NVFP4_1D_SCALING" if operand.block == (1, 16) else "NVFP4_2D_SCALING"],
        q_layout=te.QuantizeLayout["ROWWISE" if operand.axis == -1 else "COLWISE"],
        data_layout="NT",
        use_rht=operand.rht is not None,
        stochastic_rounding_rng_state=None if state is None else jnp.asarray(state),
    )

    def run(x: jax.Array) -> tuple[Array, Array]:
        found = jax.jit(lambda x: quantizer.quantize(x))(x)
        return np.asarray(found.data).view(np.uint8), np.asarray(found.scale_inv).view(np.uint8)

    return run


def _custom_calls(chosen: Recipe, tensors: dict[str, Array]) -> Iterator[Found]:
    """Both directions of a tensor in one call, as training has them."""
    backend = te_jax.TransformerEngineJaxCuda()
    if reason := backend.availability():
        yield NotRun(backend.name, reason)
        return
    answers: dict[str, Outputs | str] = {}
    for name, operand in operands(chosen):
        x, suffix = tensors[operand.tensor], "" if operand.axis == -1 else "_t"
        case = _case(operand.tensor, x, chosen)
        if operand.tensor not in answers:
            try:
                answers[operand.tensor] = backend.quantize(case)
            except Refused as refused:
                answers[operand.tensor] = str(refused)
        answer = answers[operand.tensor]
        if isinstance(answer, str):
            yield NotRun(backend.name, f"{name}: {answer}")
            continue
        expected = nv.quantize(x, rbits=case.data.get(f"rng{suffix}"), **operand.options())
        codes = nv.e2m1.unpack(answer[f"packed{suffix}"])
        found = _differences(codes, answer[f"scales{suffix}"], expected)
        yield Row(backend.name, name, x.size, found, found)


def _case(name: str, x: Array, chosen: Recipe) -> Case:
    """One tensor for both of its GEMMs.  The words are those of the kernels that the custom call dispatches to."""
    of_tensor = {operand.axis: operand for _, operand in operands(chosen) if operand.tensor == name}
    row, column = of_tensor[-1], of_tensor[0]
    data = {}
    if row.rounding == "stochastic" and column.rht is None:
        data = {key: nv.Philox(1, 8, both=True) for key in ("rng", "rng_t")}
    elif row.rounding == "stochastic":
        kernel = dispatch((x.shape[0], x.shape[1]), -1, dtype="bfloat16", block=row.block)
        data = {"rng": nv.Philox(1, 8, kernel), "rng_t": nv.Philox(1, 8, "fused-rht-columnwise")}
    return Case(name, "leg", x, block=row.block, directions="both", rounding=row.rounding, rht_t=column.rht, data=data)


def _jax_nn(chosen: Recipe, tensors: dict[str, Array]) -> Iterator[Found]:
    preset = _preset("jax-nn")
    if reason := jax_nn.JaxNN().availability():
        yield NotRun(preset, reason)
        return
    quantize, config = jax_nn.JaxNN._objects()
    for name, operand in operands(chosen):
        x = tensors[operand.tensor]
        matrix = x if operand.axis == -1 else np.ascontiguousarray(x.T)
        found = jax_nn._jitted(quantize, config)(jnp.asarray(matrix), _global_scale(matrix))
        codes, scales = (np.asarray(a).view(np.uint8) for a in found)
        own = _differences(codes, scales, nv.quantize(matrix, arithmetic=preset))
        if operand.rounding == "stochastic":
            yield Row(preset, name, x.size, own, _scales_only(scales, x, operand))
        else:
            yield Row(preset, name, x.size, own, _differences(codes, scales, nv.quantize(x, **operand.options())))
    x, w = tensors["x"], tensors["w"]
    try:
        y = _scaled_dot_general(x, w, config)
    except Exception as error:  # noqa: BLE001 - what a version or a device lacks, in JAX's words
        yield NotRun(f"{preset} fprop", f"jax.nn.scaled_dot_general: {' '.join(str(error).split())[:160]}")
        return
    a, b = (nv.quantize(each, arithmetic=preset) for each in (x, w))
    yield _result(preset, "fprop", y, a, b, "jax")


def _global_scale(x: Array) -> jax.Array:
    return jnp.asarray(np.array([np.abs(x.astype(np.float32)).max()])) / 2688


def _scaled_dot_general(x: Array, w: Array, config: Any) -> Array:
    with _package.quiet():
        configs = [config("nvfp4", _global_scale(each)) for each in (x, w, w)]
        contracted = (((1,), (1,)), ((), ()))
        y = jax.nn.scaled_dot_general(
            jnp.asarray(x), jnp.asarray(w), contracted, preferred_element_type=jnp.float32, configs=configs
        )
    return np.asarray(y)


# -- the table -------------------------------------------------------------------------------------------------


def table(found: list[Found]) -> str:
    """Operands, results, and what did not run, as text."""
    lines = [f"{'operand of':16}{'':12}{'codes':>8}{'own preset':>26}{'te':>26}"]
    for one in found:
        if isinstance(one, Row):
            lines.append(f"{one.implementation:16}{one.operand:12}{one.elements:8}{one.own!s:>26}{one.te!s:>26}")
    lines.append(f"{'result of':16}{'':12}{'float32':>8}{'not the exact sum':>26}{'largest error / bound':>26}")
    for one in found:
        if isinstance(one, Result):
            worst = f"{one.beyond} beyond it" if one.beyond else f"{one.worst:.1e}"
            lines.append(f"{one.implementation:16}{one.gemm:12}{one.elements:8}{one.different:26}{worst:>26}")
    lines += [f"not run: {one.implementation}: {one.reason}" for one in found if isinstance(one, NotRun)]
    return "\n".join(lines)


def main() -> int:
    """Print the tables; 1 when an operand differs from what its preset says, or a result is beyond the bound."""
    parser = argparse.ArgumentParser(description="Operands and results of a linear layer's GEMMs, by every JAX path.")
    parser.add_argument("--recipe", default="te", choices=[*sorted(nv.recipe.RECIPES), "all"])
    name = parser.parse_args().recipe
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    right = True
    for chosen in map(recipe, ALL if name == "all" else (name,)):
        found = list(compare(chosen, layer()))
        print(f"\nrecipe {chosen.name}\n{table(found)}")
        right = right and all(one.right for one in found)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
