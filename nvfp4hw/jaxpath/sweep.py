"""Random tensors through the JAX path and the oracle, bit for bit, on JAX's default device.

    python -m nvfp4hw.jaxpath.sweep --elements 1e8 [--size 1024] [--threads N]

Tensors are of four kinds: any bit pattern but Inf, 30 binades, normal numbers, and a lattice whose scaled values are
ties.  The calls go round: plain rowwise ones most often, then 16x16, columnwise, transformed, stochastic, 4over6,
row-scaled and both directions at once.  A call has met every kind in every dtype, compiled under one jit and stage by
stage, after 24 of its turns: with 512 rows and columns that is 1.4e8 elements.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw import jaxpath
from nvfp4hw.jaxpath import stochastic

Array = np.ndarray[Any, Any]


class Call(NamedTuple):
    """One way to quantize.

    Attributes:
        options: of ``quantize``, and of the oracle.
        bfloat16: whether it takes nothing else.
        share: how often its turn comes.
        both: by ``quantize_both``, whose rowwise result has no transform.
    """

    name: str
    options: dict[str, Any]
    bfloat16: bool = False
    share: int = 1
    both: bool = False


CALLS = (
    Call("rowwise", {}, share=8),
    Call("16x16", {"block": (16, 16)}, share=2),
    Call("columnwise", {"axis": 0}, share=2),
    Call("columnwise, Hadamard", {"axis": 0, "rht": nv.RHT()}, True, share=2),
    Call("stochastic", {"rounding": "stochastic"}, share=2),
    Call("columnwise, Hadamard, stochastic", {"axis": 0, "rht": nv.RHT(), "rounding": "stochastic"}, True),
    Call("row-scaled", {"arithmetic": nv.arithmetic("te", row_scaled=True)}),
    Call("4over6", {"arithmetic": "four-over-six"}),
    Call("both", {"rounding": "stochastic"}, both=True),
    Call("both, Hadamard", {"rht": nv.RHT(), "rounding": "stochastic"}, True, both=True),
)


class Result(NamedTuple):
    """One tensor: what was compared, and how many bytes of codes, scale bytes and amaxes differ."""

    call: str
    dtype: str
    elements: int
    different: int


def _bits(random: np.random.Generator, size: int, dtype: Any) -> Array:
    """Any pattern, NaN included, but Inf, under which there is little to see."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    x = random.integers(0, 2 ** (8 * dtype.itemsize), (size, size), unsigned).view(dtype)
    return np.where(np.isinf(x.astype(np.float32)), dtype.type(0), x)


def _binades(random: np.random.Generator, size: int, dtype: Any) -> Array:
    exponents = random.integers(-30, 1, (size, size)).astype(np.float32)
    return (random.standard_normal((size, size), np.float32) * np.exp2(exponents)).astype(dtype)


def _normal(random: np.random.Generator, size: int, dtype: Any) -> Array:
    return (random.standard_normal((size, size), np.float32) * np.float32(random.uniform(0.001, 100))).astype(dtype)


def _lattice(random: np.random.Generator, size: int, dtype: Any) -> Array:
    """Quarters of 16 up to 452 with an amax of 896, where the global scale is 3."""
    x = (random.integers(-113, 114, (size, size)) * 4).astype(np.float32)
    x[0, 0] = 896
    return x.astype(dtype)


KINDS: tuple[Callable[[np.random.Generator, int, Any], Array], ...] = (_bits, _binades, _normal, _lattice)
DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float16))


def sweep(elements: int, size: int, threads: int = 1, seed: int = 0) -> Iterator[Result]:
    """Compare tensors (size, size) until ``elements`` have been compared; a result of two directions counts twice."""
    compiled = {call.name: jax.jit(_run(call)) for call in CALLS}
    turns = itertools.cycle([call for call in CALLS for _ in range(call.share)])
    seen: Counter[str] = Counter()
    done = 0
    for number, call in enumerate(turns):
        random = np.random.default_rng([seed, number])
        turn = seen[call.name]
        seen[call.name] += 1
        dtype = DTYPES[0] if call.bfloat16 else DTYPES[turn % len(DTYPES)]
        x = KINDS[turn % len(KINDS)](random, size, dtype)
        key = jax.random.key(number) if "rounding" in call.options else None
        run = compiled[call.name] if (turn + turn // 12) % 2 else _run(call)
        found = run(jnp.asarray(x), key)
        expected = _expected(x, key, call, threads)
        different = sum(_different(q, e) for q, e in zip(found, expected, strict=True))
        done += x.size * len(found)
        yield Result(call.name, dtype.name, x.size * len(found), different)
        if done >= elements:
            return


def _run(call: Call) -> Callable[[jax.Array, Any], tuple[jaxpath.NVFP4Array, ...]]:
    if call.both:
        return lambda x, key: jaxpath.quantize_both(x, rbits=key, **call.options)
    return lambda x, key: (jaxpath.quantize(x, rbits=key, **call.options),)


def _expected(x: Array, key: Any, call: Call, threads: int) -> Iterator[nv.NVFP4Tensor]:
    """The oracle's results for the words that a key gives."""
    if call.both:
        row, column = ({"axis": axis} | call.options for axis in (-1, 0))
        each = [(row | {"rht": None}, jax.random.fold_in(key, 0)), (column, jax.random.fold_in(key, 1))]
    else:
        each = [(call.options, key)]
    for options, k in each:
        shape = x.shape if options.get("axis", -1) == -1 else x.shape[::-1]
        random = None if k is None else np.asarray(stochastic.words(k, shape))
        yield nv.quantize(x, rbits=random, threads=threads, **options)


def _different(q: jaxpath.NVFP4Array, expected: nv.NVFP4Tensor) -> int:
    amaxes = np.asarray(q.amax).view(np.uint32) != expected.amax.view(np.uint32)
    packed, scales = (np.asarray(a) != b for a, b in ((q.packed, expected.packed), (q.scales, expected.scales)))
    return int(packed.sum() + scales.sum() + amaxes.sum())


def main() -> int:
    """Print what was compared; 1 when anything differs."""
    parser = argparse.ArgumentParser(description="Random tensors through the JAX path and the oracle.")
    parser.add_argument("--elements", type=float, default=1e7, help="how many to compare")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a tensor, a multiple of 16")
    parser.add_argument("--threads", type=int, default=1, help="of the oracle")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    least = min(options.size // 16, options.threads, options.seed + 1)
    if options.size % 16 or least < 1 or not 1 <= options.elements < 1e15:
        parser.error("size is a positive multiple of 16, elements and threads are at least 1, seed at least 0")
    start, results = time.monotonic(), []
    for result in sweep(int(options.elements), options.size, options.threads, options.seed):
        results.append(result)
        if sys.stderr.isatty():
            done = sum(r.elements for r in results)
            print(f"\r{done:.2e} of {options.elements:.2e} elements", end="", file=sys.stderr)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {time.monotonic() - start:.0f} s")
    for name in dict.fromkeys(r.call for r in results):
        of_name = [r for r in results if r.call == name]
        types = ", ".join(sorted({r.dtype for r in of_name}))
        elements, different = sum(r.elements for r in of_name), sum(r.different for r in of_name)
        print(f"{name:34}{elements:14,} elements {different:6} differ   {types}")
    total, different = sum(r.elements for r in results), sum(r.different for r in results)
    print(f"{'all':34}{total:14,} elements {different:6} differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
