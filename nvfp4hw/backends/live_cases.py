"""Cases of the backends on a GPU that no suite has: large tensors, single kernels, a linear layer, matrix products.

They are the same on every machine and in every suite, so that a recording can be judged where there is no GPU.
Inputs are made of raw PCG64 words and exact operations, and sit on rounding boundaries where they can: on
ordinary values a wrong scale formula shows in one scale of ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends.base import Case
from nvfp4hw.rng import OFFSET_STEP
from nvfp4ref.streams import dispatch

Array = np.ndarray[Any, Any]
F = np.float32

#: Both dimensions are multiples of 16 and not of 32: Hopper's build quantizes such tensors of every dtype.
ODD = (1072, 2064)
#: Multiples of 128: the tuned, 2-D and fused kernels, which only Blackwell runs.
EVEN = (1024, 2048)
#: Of the large tensors.  With the first S is 3, and a quarter lattice lies on ties; with the other
#: every other form of the global scale and order of the block scale's operations gives another byte somewhere.
AMAXES = (896.0, 2080.0)
#: Neither takes the fused transform anywhere.
TRANSFORMED = (1072, 1040)
#: Tiles in multiples of 4 both ways, as the recipe kernels index padded scales.
WEIGHTS = ((192, 320), (1088, 2048))
#: M, N and K of the matrix products.
PRODUCTS = ((128, 128, 64), (256, 128, 512), (128, 384, 4096))
SEED, OFFSET = 0x9E3779B97F4A7C15 >> 1, 4096  # a torch seed has 63 bits
RULES = ("sm100", "te-fallback")

_DTYPES: dict[str, Any] = {"f32": F, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def _words(seed: int, count: int) -> Array:
    """Uniform 32-bit words; PCG64's raw stream is part of NumPy's promise."""
    return np.random.PCG64(seed).random_raw(count) >> np.uint64(32)


def _normal(seed: int, shape: tuple[int, int]) -> Array:
    """float32 of four uniform words less their mean, each: exact until one rounding."""
    words = _words(seed, 4 * shape[0] * shape[1]).reshape(4, *shape)
    return ((words.sum(0).astype(np.float64) - 2.0**33) * 2.0**-31).astype(F)


@cache
def adversarial(shape: tuple[int, int], dtype: str, amax: float = AMAXES[0]) -> Array:
    """A tensor of four kinds of rows, sixteen of each in turn.

    Normal values of row-wise scales over 28 binades; a quarter lattice, whose scaled elements are ties; blocks
    whose amaxes are midpoints of E4M3 scales, and their neighbours; zero blocks, −0 and single outliers.
    """
    rows, columns = shape
    x = _normal(1, shape)
    words = _words(2, rows * columns).reshape(shape)
    kind = np.arange(rows) // 16 % 4
    x = (x * np.exp2(-(np.arange(rows) % 28)).astype(F)[:, None] * F(amax / 896)).astype(F)
    signs = np.where(words >> np.uint64(31), F(-1), F(1))
    lattice = ((words % np.uint64(113)).astype(F) * F(amax / 224)) * signs
    x[kind == 1] = lattice[kind == 1]
    levels = nv.e4m3.decode(np.arange(127, dtype=np.uint8))
    midpoints = (levels[:-1].astype(np.float64) + levels[1:].astype(np.float64)) / 2
    middle = (midpoints * 6 * amax / 2688)[_words(3, rows * (columns // 16)) % np.uint64(126)].astype(F)
    middle = (middle.view(np.int32) + (_words(4, middle.size) % np.uint64(3)).astype(np.int32) - 1).view(F)
    ramp = (np.arange(16, 0, -1) / 16).astype(F) * np.where(np.arange(16) % 2, F(-1), F(1))
    x[kind == 2] = (middle[:, None] * ramp).reshape(shape)[kind == 2]
    sparse = np.where(words % np.uint64(8) == 0, x, np.where(words >> np.uint64(31), F(-0.0), F(0)))
    sparse[:, ::64] *= F(2.0**12)
    x[kind == 3] = sparse[kind == 3].astype(F)
    x = np.clip(x, -amax, amax).astype(F)
    x[0, 0], x[-1, -1] = amax, -amax
    return x.astype(_DTYPES[dtype])


@cache
def wide(shape: tuple[int, int]) -> Array:
    """bfloat16 over 40 binades inside each 16 rows: sums in which the transform's truncation shows."""
    exponents = 110 + _words(5, shape[0] * shape[1]).reshape(shape) % np.uint64(40)
    words = _words(6, shape[0] * shape[1]).reshape(shape)
    bits = (words & np.uint64(0x807F)) | exponents << np.uint64(7)
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


# ---- families ----------------------------------------------------------------------------------------------


def kernel_cases() -> Iterator[Case]:
    """Of the backend ``te-torch-kernels``."""
    yield from _nearest()
    for rule in RULES:
        yield from _stochastic(rule)
    yield from _hadamard()
    yield from _dequantize()
    yield from _recipe()
    for rule in RULES:
        yield _linear(rule)
    yield from gemm_cases("pytorch")


def _id(family: str, x: Array, dtype: str, block: tuple[int, int], directions: str, *more: str) -> str:
    return ".".join((f"live/{family}.{x.shape[0]}x{x.shape[1]}", dtype, f"{block[0]}x{block[1]}", directions, *more))


def _nearest() -> Iterator[Case]:
    hunts = "order and rounding of the scale operations, on millions of scales"

    def case(x: Array, dtype: str, block: tuple[int, int], directions: str, *more: str, rht: Any = None) -> Case:
        ident = _id("nearest", x, dtype, block, directions, *more)
        return Case(ident, "live/nearest", x, block=block, directions=directions, rht_t=rht, hunts=hunts)

    for amax in AMAXES:
        for shape, dtypes in ((ODD, ("f32", "bf16", "f16")), (EVEN, ("bf16",))):
            for dtype in dtypes:
                x = adversarial(shape, dtype, amax)
                for block in ((1, 16), (16, 16)):
                    yield case(x, dtype, block, "both", f"amax-{amax:.0f}")
    x = adversarial(EVEN, "bf16")
    yield case(x, "bf16", (1, 16), "col")
    for directions in ("col", "both"):
        yield case(x, "bf16", (1, 16), directions, "rht", rht=nv.RHT())


def _states(x: Array, block: tuple[int, int], directions: str, rht: bool, fused: bool) -> dict[str, nv.Philox]:
    """The generators of the outputs that one call makes, with the kernel that the package dispatches to.

    ``fused``: the device has the fused transform; elsewhere each direction is a launch of its own.
    """
    both = directions == "both"
    found = {}
    for state, axis in {"row": (("rng", -1),), "col": (("rng_t", 0),)}.get(directions, (("rng", -1), ("rng_t", 0))):
        how = {"dtype": x.dtype.name, "block": block}
        kernel = dispatch(x.shape, axis, both=both, rht=rht, **how)
        if rht and (not fused or kernel != "fused-rht"):
            kernel = "unfused-rht" if axis == 0 else dispatch(x.shape, axis, **how)
        offset = OFFSET + (OFFSET_STEP if kernel == "unfused-rht" else 0)
        found[state] = nv.Philox(SEED, offset, kernel, both=both and (not rht or kernel == "fused-rht"))
    return found


def _stochastic(rule: str) -> Iterator[Case]:
    hunts = "random words: their mapping to elements, their offset, and the rounding itself, on ten million codes"

    def case(
        x: Array, dtype: str, block: tuple[int, int], directions: str, rht: bool = False, amax: Any = None
    ) -> Case:
        more = (*(("rht",) if rht else ()), *(("given-amax",) if amax is not None else ()), rule)
        return Case(
            _id("stochastic", x, dtype, block, directions, *more),
            "live/stochastic",
            x,
            block=block,
            directions=directions,
            rounding="stochastic",
            rht_t=nv.RHT() if rht else None,
            amax=amax,
            amax_t=amax,
            fields={"stochastic": rule},
            data=_states(x, block, directions, rht, fused=rule == "sm100"),
            hunts=hunts,
        )

    for dtype in ("f32", "bf16", "f16"):
        for block, amax in zip(((1, 16), (16, 16)), AMAXES, strict=True):
            yield case(adversarial(ODD, dtype, amax), dtype, block, "both")
    for directions in ("row", "col"):
        yield case(adversarial(ODD, "f32"), "f32", (1, 16), directions)
    x = adversarial(EVEN, "bf16")
    yield case(x, "bf16", (1, 16), "col")
    yield case(x, "bf16", (1, 16), "both")
    yield case(x, "bf16", (16, 16), "both")
    yield case(x, "bf16", (1, 16), "both", rht=True)
    x = adversarial(TRANSFORMED, "bf16")
    yield case(x, "bf16", (1, 16), "both", rht=True)
    yield case(x, "bf16", (1, 16), "both", rht=True, amax=F(1024))


def _hadamard() -> Iterator[Case]:
    for shape in (ODD, (1024, 1024)):
        for mask in (0xD7E8, 0, 0x1234):
            for name, x in (("wide", wide(shape)), ("adversarial", adversarial(shape, "bf16"))):
                yield Case(
                    f"live/hadamard.{name}.{shape[0]}x{shape[1]}.mask-{mask:04X}",
                    "live/hadamard",
                    x,
                    kind="hadamard",
                    rht_t=nv.RHT(sign_mask=mask),
                    hunts="the transform: signs, order, the tensor core's truncated sum, its rounding to bfloat16",
                )


def _dequantize() -> Iterator[Case]:
    """Every scale byte with every code, with amaxes whose products round, overflow and vanish."""
    scales = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    packed = nv.e2m1.pack(codes)
    amaxes = {"pi": 0x40490FDB, "2688": 0x45280000, "third": 0x3EAAAAAB, "tiny": 0x00800000, "subnormal": 0x00000001}
    amaxes |= {"flt-max": 0x7F7FFFFF, "overflow": 0x7B124925, "zero": 0, "inf": 0x7F800000, "nan": 0x7FC00000}
    for name, bits in amaxes.items():
        for maximum in (448, 256):
            amax = np.array(bits, np.uint32).view(F)
            yield Case(
                f"live/dequantize.amax-{name}.{maximum}",
                "live/dequantize",
                packed,
                kind="dequantize",
                fields={"e4m3_max": 256} if maximum == 256 else {},
                data={"packed": packed, "scales": scales, "amax": amax, "e4m3_max": maximum},
                hunts="order of the products in dequantize",
            )
    x = adversarial(ODD, "f32")
    q = nv.quantize(x)
    yield Case(
        "live/dequantize.large",
        "live/dequantize",
        q.packed,
        kind="dequantize",
        data={"packed": q.packed, "scales": q.scales, "amax": np.asarray(q.amax)},
        hunts="order of the products in dequantize",
    )


def _recipe() -> Iterator[Case]:
    hunts = "bits of the partial-cast helpers for sharded weights"
    every = np.concatenate([np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32), [0x7F800000, 1, 0x00800000]])
    yield Case("live/recipe.global-scale", "live/recipe", every.astype(np.uint32).view(F), kind="recipe", hunts=hunts)
    for dtype in ("f32", "bf16"):
        for shape in WEIGHTS:
            x = adversarial(shape, dtype)
            yield Case(
                f"live/amax.{shape[0]}x{shape[1]}.{dtype}",
                "live/amax",
                x,
                kind="amax",
                hunts="amax that is not max(abs(x))",
            )
            for name, amax in (
                ("own", F(896)),
                ("pi", F(np.pi)),
                ("zero", F(0)),
                ("inf", F(np.inf)),
                ("flt-max", np.finfo(F).max),
            ):
                yield Case(
                    f"live/recipe.{shape[0]}x{shape[1]}.{dtype}.amax-{name}",
                    "live/recipe",
                    x,
                    kind="recipe",
                    block=(16, 16),
                    data={"amax": np.asarray(amax), "start": 82, "length": shape[0] * shape[1] // 2},
                    hunts=hunts,
                )
    for rows, columns in ((144, 5), (256, 32), (1072, 129)):
        scales = _words(7, rows * columns).astype(np.uint8).reshape(rows, columns)
        yield Case(
            f"live/swizzle.{rows}x{columns}", "live/swizzle", scales, kind="swizzle", hunts="the 128x4 scale layout"
        )


def _linear(rule: str) -> Case:
    """A layer of 512 features.  Its gradient goes through the fused kernel where there is the hardware's rounding;
    the other rule's has a width that the fused kernel does not take, so that its words are the same everywhere."""
    tokens, features, outputs = 256, 512, 384 if rule == "sm100" else 352
    return Case(
        f"live/linear.{tokens}x{features}x{outputs}.{rule}",
        "live/linear",
        _normal(11, (tokens, features)).astype(ml_dtypes.bfloat16),
        kind="linear",
        fields={"stochastic": rule},
        data={
            "w": (_normal(12, (outputs, features)) * F(0.05)).astype(ml_dtypes.bfloat16),
            "dy": (_normal(13, (tokens, outputs)) * F(0.01)).astype(ml_dtypes.bfloat16),
            "rng": nv.Philox(SEED, OFFSET),
        },
        hunts="who gets what: blocks, transform and rounding of the six operands; the three products",
    )


def gemm_cases(alpha_form: str) -> Iterator[Case]:
    """Products of two operands: random codes and scales; scales over the whole of E4M3, where the accumulator cuts off.

    ``alpha_form`` is that of ``nvfp4ref.matmul``: "pytorch", or "none" for a product without tensor scales.
    """
    hunts = "the accumulator: its width, its rounding, the order of the words; alpha"
    for name, low, high in (("near", 0x30, 0x40), ("wide", 0x01, 0x7E)):
        for m, n, k in PRODUCTS:
            data: dict[str, Any] = {"alpha_form": alpha_form}
            for number, (operand, rows) in enumerate((("a", m), ("b", n))):
                data[f"{operand}_packed"] = _words(20 + number, rows * k // 2).astype(np.uint8).reshape(rows, k // 2)
                scales = low + _words(30 + number, rows * k // 16) % np.uint64(high - low + 1)
                data[f"{operand}_scales"] = scales.astype(np.uint8).reshape(rows, k // 16)
                data[f"{operand}_amax"] = np.asarray(F(2688))
            for dtype in ("float32", "bfloat16"):
                yield Case(
                    f"live/gemm.{name}.{m}x{n}x{k}.{dtype}.alpha-{alpha_form}",
                    "live/gemm",
                    data["a_packed"],
                    kind="gemm",
                    data={**data, "out_dtype": dtype},
                    hunts=hunts,
                )
