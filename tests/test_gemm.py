"""The block-scaled matmul: the fast path against the chain of words, the epilogue against one float32 at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import Array, bfloat16, decades, every_class, random, same_bits

import nvfp4ref as nv
from nvfp4ref import e2m1, e4m3, gemm, scalar, tensorcore

pytestmark = pytest.mark.filterwarnings("error")

CHAINED = [model for model in tensorcore.MODELS if model != "exact"]
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def tensor(codes: Any, scales: Any, amax: Any = 2688.0, arithmetic: str | nv.Arithmetic = "te") -> nv.NVFP4Tensor:
    """A tensor of given codes (R, K) and scale bytes (R, K/16); by default its tensor scale is 1."""
    codes = np.asarray(codes, np.uint8)
    scales = np.broadcast_to(np.asarray(scales, np.uint8), (len(codes), codes.shape[1] // 16)).copy()
    amax = np.asarray(amax, np.float32)
    return nv.NVFP4Tensor.from_arrays(e2m1.pack(codes), scales, amax, arithmetic=arithmetic)


def chain(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor, model: str) -> Array:
    """The accumulators, each word's C the D of the one before (GEMM-ACCUMULATE)."""
    (m, k), n = a.shape, b.shape[0]
    pad = -k % 64
    operands = []
    for q in (a, b):
        operands.append((np.pad(q.codes, ((0, 0), (0, pad))), np.pad(q.scales, ((0, 0), (0, pad // 16)))))
    (codes_a, scales_a), (codes_b, scales_b) = operands
    c = np.zeros(m * n, np.float32)
    for w in range((k + pad) // 64):
        part, scale = slice(64 * w, 64 * w + 64), slice(4 * w, 4 * w + 4)
        c = tensorcore.mma_words(
            np.repeat(codes_a[:, part], n, axis=0),
            np.tile(codes_b[:, part], (m, 1)),
            c,
            np.repeat(scales_a[:, scale], n, axis=0),
            np.tile(scales_b[:, scale], (m, 1)),
            model=model,
        )
    return c.reshape(m, n)


def exact_chain(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor) -> Array:
    """The whole sum in integers of 2^-20, rounded once by the slow twin."""
    values = []
    for q in (a, b):
        scales = e4m3.decode(q.scales & 0x7F).astype(np.float64) * 512
        units = 2 * e2m1.decode(q.codes).astype(np.float64) * np.repeat(scales, 16, axis=-1)
        values.append([[int(v) for v in row] for row in units])
    sums = [[sum(x * y for x, y in zip(r, s, strict=True)) for s in values[1]] for r in values[0]]
    return np.array([[scalar.fl(Fraction(v, 2**20)) for v in row] for row in sums], np.float64).astype(np.float32)


def raw(rows: int, k: int, seed: int, low: int = 0, high: int = 127) -> nv.NVFP4Tensor:
    """Any codes under any scale bytes of a range, some blocks of zeros, some scales zero."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, k), np.uint8)
    scales = rng.integers(low, high, (rows, k // 16), np.uint8)
    codes.reshape(rows, -1, 16)[rng.random((rows, k // 16)) < 0.2] &= 8
    scales[rng.random(scales.shape) < 0.1] = 0
    scales[rng.random(scales.shape) < 0.3] |= 0x80  # the sign bit is ignored
    return tensor(codes, scales)


def sparse(rows: int, k: int, seed: int) -> nv.NVFP4Tensor:
    """One or two elements a block, scales at the ends of the range: sums that hang on single bits."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, k), np.uint8)
    codes[rng.random((rows, k)) < 0.9] = 0
    scales = rng.choice(np.array([0, 1, 7, 8, 0x38, 0x78, 0x7E], np.uint8), (rows, k // 16))
    return tensor(codes, scales)


def cancelling(rows: int, k: int, seed: int) -> nv.NVFP4Tensor:
    """Halves of every block undo each other against b's repeated halves, but for one element now and then."""
    rng = np.random.default_rng(seed)
    half = rng.integers(0, 16, (rows, k // 16, 8), np.uint8)
    sign = np.uint8(8) if seed % 2 else np.uint8(0)
    codes = np.concatenate([half, half ^ sign], axis=2).reshape(rows, k)
    spoilt = rng.random((rows, k)) < 0.005
    codes[spoilt] = rng.integers(0, 16, int(spoilt.sum()), np.uint8)
    return tensor(codes, rng.choice(np.array([1, 8, 0x30, 0x7E], np.uint8), (rows, k // 16)))


def pairs() -> Iterator[tuple[str, nv.NVFP4Tensor, nv.NVFP4Tensor]]:
    """(name, a, b) of every shape that matters: K of part words, rows and columns that are no multiple of a tile."""
    for k in (32, 64, 96, 160, 256):
        yield f"quantized-{k}", nv.quantize(random(19, k)), nv.quantize(random(21, k, 1))
        yield f"raw-{k}", raw(17, k, k), raw(23, k, k + 1)
    yield "one", nv.quantize(random(1, 32)), nv.quantize(random(1, 32, 1))
    yield "odd", nv.quantize(random(65, 128)), nv.quantize(random(130, 128, 1))
    yield "decades", nv.quantize(decades(33, 320, low=-9, high=3)), nv.quantize(decades(20, 320, 7, low=-9, high=3))
    yield "wide", nv.quantize(decades(30, 256)), nv.quantize(decades(18, 256, 7))
    yield "narrow", raw(40, 192, 3, 60, 90), raw(31, 192, 4, 60, 90)
    yield "sparse", sparse(64, 256, 0), sparse(48, 256, 2)
    yield "cancelling", cancelling(33, 256, 1), cancelling(29, 256, 2)
    yield "zeros", nv.quantize(np.zeros((3, 64), np.float32)), nv.quantize(random(5, 64))
    zeros = random(9, 128)
    zeros[::3], zeros[:, 16:48] = 0, 0
    yield "zero rows", nv.quantize(zeros), nv.quantize(random(5, 128))
    yield "2-D", nv.quantize(random(32, 64)), nv.quantize(random(48, 64, 1), block=(16, 16))


PAIRS = {name: (a, b) for name, a, b in pairs()}


# -- accumulation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CHAINED)
@pytest.mark.parametrize("name", PAIRS)
def test_fast_path_is_the_chain_of_words(name: str, model: str) -> None:
    """GEMM-ACCUMULATE, GEMM-EXACT-BOUND"""
    a, b = PAIRS[name]
    same_bits(gemm.accumulate(a, b, model=model), chain(a, b, model))


@pytest.mark.parametrize("name", PAIRS)
def test_exact_is_one_rounding_of_the_whole_sum(name: str) -> None:
    a, b = (nv.NVFP4Tensor(q.packed[:12], q.scales[:12], q.amax) for q in PAIRS[name])
    same_bits(gemm.accumulate(a, b, model="exact"), exact_chain(a, b) + np.float32(0))


@pytest.mark.parametrize("model", CHAINED)
def test_every_word_windowed_is_the_chain_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MMA-WINDOW on whole tiles, where the bound would have spared it"""
    monkeypatch.setattr(gemm, "_exact_words", lambda a, b: np.zeros(len(a.values), bool))
    monkeypatch.setattr(gemm, "_within_bound", lambda a, b, w, c: False)
    for a, b in PAIRS.values():
        same_bits(gemm.accumulate(a, b, model=model), chain(a, b, model))


@pytest.mark.parametrize(("block", "tile", "stripe"), [(16, 32, 48), (8, 40, 40), (64, 64, 64), (1, 7, 20)])
def test_tiles_do_not_matter(block: int, tile: int, stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: gemm.accumulate(*pair) for name, pair in PAIRS.items()}
    monkeypatch.setattr(gemm, "BLOCK", block)
    monkeypatch.setattr(gemm, "TILE", tile)
    monkeypatch.setattr(gemm, "STRIPE", stripe)
    for name, pair in PAIRS.items():
        same_bits(gemm.accumulate(*pair), expected[name])


def test_several_stripes_and_threads() -> None:
    a, b = nv.quantize(random(70, 96)), nv.quantize(decades(gemm.STRIPE + 70, 96, low=-9, high=3))
    found = gemm.accumulate(a, b, threads=1)
    for threads in (2, 5, None):
        same_bits(gemm.accumulate(a, b, threads=threads), found)
    piece = nv.NVFP4Tensor(b.packed[-80:], b.scales[-80:], b.amax)
    same_bits(found[:, -80:], chain(a, piece, "blackwell"))


@given(st.data(), st.sampled_from(CHAINED), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_any_operands(data: st.DataObject, model: str, seed: int) -> None:
    k = data.draw(st.sampled_from([32, 64, 96, 128, 320]))
    made = []
    for i in range(2):
        rows = data.draw(st.integers(1, 9))
        kind = data.draw(st.sampled_from(["raw", "narrow", "sparse", "cancelling", "quantized"]))
        low = data.draw(st.integers(0, 110))
        made.append(
            {
                "raw": lambda r=rows, s=seed + i: raw(r, k, s),
                "narrow": lambda r=rows, s=seed + i, lo=low: raw(r, k, s, lo, lo + 16),
                "sparse": lambda r=rows, s=seed + i: sparse(r, k, s),
                "cancelling": lambda r=rows, s=seed + i: cancelling(r, k, s),
                "quantized": lambda r=rows, s=seed + i: nv.quantize(decades(r, k, s, low=-12, high=2)),
            }[kind]()
        )
    same_bits(gemm.accumulate(*made, model=model), chain(*made, model=model))


def bound_case(exponent: int) -> tuple[nv.NVFP4Tensor, nv.NVFP4Tensor]:
    """C = 2^exponent after the first word, then −2^-20: exponents ``exponent`` + 12 apart."""
    codes = np.zeros((2, 1, 128), np.uint8)
    scales = np.zeros((2, 1, 8), np.uint8)
    up = (exponent - 4) // 2
    codes[:, 0, 0] = 6  # 4·4
    scales[0, 0, 0], scales[1, 0, 0] = (up + 7) << 3, (exponent - 4 - up + 7) << 3
    codes[0, 0, 64], codes[1, 0, 64] = 9, 1  # −0.5·0.5
    scales[:, 0, 4] = 1  # 2^-9
    return tensor(codes[0], scales[0]), tensor(codes[1], scales[1])


@pytest.mark.parametrize(
    ("exponent", "windowed", "expected"), [(14, 0, 0x467FFFFF), (15, 0, 0x46FFFFFF), (16, 1, 0x47800000)]
)
def test_the_bound_is_tight(exponent: int, windowed: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMM-EXACT-BOUND: 27 holds with the exact sum rounded toward zero, at 28 the window changes the bits"""
    calls = []
    plain = gemm._windowed_word
    monkeypatch.setattr(gemm, "_windowed_word", lambda *given: calls.append(given[2]) or plain(*given))
    a, b = bound_case(exponent)
    found = gemm.accumulate(a, b)
    assert int(found.view(np.uint32)[0, 0]) == expected
    assert len(calls) == windowed
    same_bits(found, chain(a, b, "blackwell"))
    for model in ("window39-k4", "window39-k16", "blackwell-snapshot"):
        same_bits(gemm.accumulate(a, b, model=model), chain(a, b, model))


def test_a_block_of_zeros_under_a_large_scale() -> None:
    """It moves the snapshot's window, so the bound must see it, although it is not live"""
    codes, scales = np.zeros((1, 64), np.uint8), np.array([[1, 0x7E, 0, 0]], np.uint8)
    codes[0, 0] = 1
    a = tensor(codes, scales)
    for model in CHAINED:
        same_bits(gemm.accumulate(a, a, model=model), chain(a, a, model))
    assert gemm.accumulate(a, a)[0, 0] == 2.0**-20
    assert gemm.accumulate(a, a, model="blackwell-snapshot")[0, 0] == 0


def cancelled_after(first: int, then: str) -> tuple[nv.NVFP4Tensor, nv.NVFP4Tensor]:
    """Code ``first`` times 0.5 under 2^-18, then a word of large scales that adds nothing."""
    codes, scales = np.zeros((2, 1, 128), np.uint8), np.zeros((2, 1, 8), np.uint8)
    codes[:, 0, 0], scales[:, 0, 0] = (first, 1), 1
    if then == "cancelling groups":
        codes[:, 0, 64], codes[:, 0, 80], scales[:, 0, 4:6] = (7, 7), (7, 15), 0x7E
    else:  # zeros
        codes[1, 0, 64:], scales[:, 0, 4:] = 9, 0x7E
    return tensor(codes[0], scales[0]), tensor(codes[1], scales[1])


def test_c_is_cut_too() -> None:
    """2^-20 left by an earlier word is below the window of a word whose large groups cancel"""
    a, b = cancelled_after(1, "cancelling groups")
    for model in CHAINED:
        same_bits(gemm.accumulate(a, b, model=model), chain(a, b, model))
    assert gemm.accumulate(a, b)[0, 0] == 0 and gemm.accumulate(a, b, model="exact")[0, 0] == 2.0**-20


def test_a_negative_c_that_is_cut_away_leaves_plus_zero() -> None:
    a, b = cancelled_after(9, "zeros")
    assert gemm.accumulate(a, b)[0, 0] == -(2.0**-20)
    same_bits(gemm.accumulate(a, b, model="blackwell-snapshot"), np.zeros((1, 1), np.float32))


def test_ordinary_tensors_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal data never need the window: the fast path is what users get"""
    monkeypatch.setattr(gemm, "_windowed_word", lambda *given: pytest.fail("windowed"))
    gemm.accumulate(nv.quantize(random(64, 1024)), nv.quantize(random(64, 1024, 1)))


def test_zero_is_positive() -> None:
    """MMA-ROUND: cancelled sums, negative zeros, and zeros below the window"""
    minus = tensor(np.full((2, 64), 8), 0x38)
    plus = tensor(np.full((2, 64), 2), 0x38)
    codes = np.full((1, 64), 2, np.uint8)
    codes[0, ::2] = 10
    for model in tensorcore.MODELS:
        for a, b in ((minus, plus), (minus, minus), (tensor(codes, 0x38), plus), (tensor(codes, 0xB8), plus)):
            same_bits(gemm.accumulate(a, b, model=model), np.zeros((a.shape[0], 2), np.float32))


# -- split-K ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split_k", [1, 2, 3, 5])
@pytest.mark.parametrize("model", ["blackwell", "group64", "exact"])
def test_split_k(model: str, split_k: int) -> None:
    """GEMM-SPLIT-K: contiguous runs of words, added in order in float32; 5 words in 2 runs are 2 and 3"""
    a, b = (nv.quantize(decades(rows, 320, rows, low=-5, high=4)) for rows in (20, 24))
    edges = [5 * i // split_k for i in range(split_k + 1)]
    total: Any = None
    for start, stop in zip(edges, edges[1:], strict=False):
        packed, scales = slice(32 * start, 32 * stop), slice(4 * start, 4 * stop)
        parts = [nv.NVFP4Tensor(q.packed[:, packed], q.scales[:, scales], q.amax) for q in (a, b)]
        piece = gemm.accumulate(*parts, model=model)
        total = piece if total is None else total + piece
    same_bits(gemm.accumulate(a, b, model=model, split_k=split_k), total)


def test_split_k_changes_bits() -> None:
    a, b = (nv.quantize(decades(64, 1024, seed, low=-4, high=4)) for seed in (1, 2))
    assert (nv.matmul(a, b) != nv.matmul(a, b, split_k=2)).any()


# -- NaN -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_scale_bytes(byte: int) -> None:
    """MMA-SPECIAL: the whole row or column is the canonical NaN, with a warning that counts them"""
    a, b = nv.quantize(random(9, 96)), nv.quantize(random(70, 96, 1))
    a.scales[4, 2] = byte
    b.scales[66, 5] = b.scales[66, 0] = byte
    clean = [nv.NVFP4Tensor(q.packed, np.where(q.scales & 0x7F == 0x7F, 0, q.scales), q.amax) for q in (a, b)]
    for model in tensorcore.MODELS:
        with pytest.warns(RuntimeWarning, match="1 row of a and 1 row of b have NaN scale bytes") as caught:
            found = nv.matmul(a, b, model=model)
        assert caught[0].filename == __file__
        expected = nv.matmul(*clean, model=model)
        expected[4], expected[:, 66] = NAN, NAN
        same_bits(found, expected)
        if model != "exact":
            with warnings.catch_warnings(action="ignore"):
                same_bits(gemm.accumulate(a, b, model=model), chain(a, b, model))
    with pytest.warns(RuntimeWarning):
        assert (nv.matmul(a, b, out_dtype=bfloat16).view(np.uint16)[4] == 0x7FFF).all()
    with pytest.warns(RuntimeWarning):
        assert (nv.matmul(a, b, out_dtype=np.float16).view(np.uint16)[4] == 0x7FFF).all()


# -- epilogue --------------------------------------------------------------------------------------------------


def single(values: Any) -> Array:
    """Python floats as float32 with the kernels' NaN."""
    array = np.asarray(values, np.float64).astype(np.float32)
    array[np.isnan(array)] = NAN
    return array


def each(function: Any, *arrays: Any) -> Array:
    """A function of Python floats over broadcast arrays, as float32."""
    columns = np.broadcast_arrays(*[np.asarray(a, np.float64) for a in arrays])
    found = [function(*(float(v) for v in one)) for one in zip(*(c.ravel() for c in columns), strict=True)]
    return single(found).reshape(columns[0].shape)


def slow_alpha(a: nv.NVFP4Tensor, b: nv.NVFP4Tensor, alpha: float, form: str, amaxes: tuple[float, float]) -> float:
    """GEMM-ALPHA, one float32 operation at a time."""
    mul, div = scalar.mul, scalar.div
    maxes = (448, 448) if form == "grouped" else (a.arithmetic.e4m3_max, b.arithmetic.e4m3_max)
    if form == "none":
        return alpha
    if form == "jax":
        return mul(alpha, mul(div(amaxes[0], 6.0 * maxes[0]), div(amaxes[1], 6.0 * maxes[1])))
    return mul(mul(mul(alpha, amaxes[0]), amaxes[1]), div(1.0, 36.0 * maxes[0] * maxes[1]))


FORMS = ["pytorch", "grouped", "jax", "none"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind_b", ["te", "four-over-six"])
@pytest.mark.parametrize("kind_a", ["te", "four-over-six"])
def test_alpha(form: str, kind_a: str, kind_b: str) -> None:
    """GEMM-ALPHA, GEMM-EPILOGUE: 448 and 256 on either side"""
    a = nv.quantize(random(7, 64), arithmetic=kind_a, amax=np.float32(3.1415927))
    b = nv.quantize(3 * random(9, 64, 1), arithmetic=kind_b, amax=np.float32(8.1548455))
    total = gemm.accumulate(a, b)
    for alpha in (1.0, 0.7, 1.1, 1 / 3, 0.123, -(2.0**-20)):
        alpha = float(np.float32(alpha))
        factor = slow_alpha(a, b, alpha, form, (float(a.amax), float(b.amax)))
        same_bits(nv.matmul(a, b, alpha=alpha, alpha_form=form), each(scalar.mul, total, factor))


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 3e19, 3.4e38, np.inf, np.nan, -2.0])
def test_alpha_of_any_amax(form: str, amax: float) -> None:
    """The products overflow, underflow to subnormals, and are NaN where the kernels' are"""
    for other in (0.0, 1e-30, 2.0, 1e20, np.inf):
        codes = np.random.default_rng(5).integers(0, 16, (4, 32), np.uint8)
        a, b = tensor(codes, 0x38, amax), tensor(codes[::-1], 0x40, other)
        factor = slow_alpha(a, b, 1.0, form, (float(a.amax), float(b.amax)))
        same_bits(nv.matmul(a, b, alpha_form=form), each(scalar.mul, gemm.accumulate(a, b), factor))


def fma(x: float, y: float, z: float) -> float:
    if not all(map(np.isfinite, (x, y, z))):
        return scalar.add(scalar.mul(x, y), z)
    total = Fraction(x) * Fraction(y) + Fraction(z)
    return scalar.fl(total) if total else x * y + z


@pytest.mark.parametrize("beta", [1.0, -0.3, 2.0**-30, 1e30])
def test_source(beta: float) -> None:
    """GEMM-EPILOGUE: fma(alpha, accumulator, fl(beta·c)), one rounding where two would differ"""
    a, b = nv.quantize(random(16, 128)), nv.quantize(random(24, 128, 1))
    total, beta = gemm.accumulate(a, b), float(np.float32(beta))
    factor = slow_alpha(a, b, 1.0, "pytorch", (float(a.amax), float(b.amax)))
    c = nv.matmul(a, b) * np.float32(-1 / beta)  # what nearly cancels shows the second rounding
    c[:8] = every_class(8, 32)[:, :24]
    c[np.isnan(c)] = NAN  # a signalling NaN warns when it is copied
    c[8:10] = decades(2, 32)[:, :24]
    found = nv.matmul(a, b, beta=beta, c=c)
    same_bits(found, each(lambda t, v: fma(t, factor, scalar.mul(beta, v)), total, c))
    with np.errstate(all="ignore"):
        twice = total * np.float32(factor) + np.float32(beta) * c
    assert (twice[10:] != found[10:]).any()


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=20))
@settings(max_examples=100)
def test_fused(numbers: list[tuple[int, int, int]]) -> None:
    """The fused operation on any float32"""
    total, alpha, source = np.array(numbers, np.uint32).view(np.float32).T.copy()
    total[~np.isfinite(total)] = 1
    with np.errstate(all="ignore"):
        found = np.array([gemm._fused(t[None], f, s[None])[0] for t, f, s in zip(total, alpha, source, strict=True)])
        wide = [array.astype(np.float64) for array in (total, alpha, source)]
    small = np.abs(wide[0]) >= 2.0**-20  # an accumulator is no smaller, so that the product is exact
    found[np.isnan(found)] = NAN
    same_bits(found[small], each(fma, *wide)[small])


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_output_rounding_and_bias(dtype: Any) -> None:
    """GEMM-EPILOGUE: bias in float32, then one rounding"""
    a, b = nv.quantize(random(16, 128)), nv.quantize(random(24, 128, 1))
    bias = random(1, 32, 5)[0, :24] * np.float32(1.0001)
    plain = nv.matmul(a, b)
    with_bias = each(scalar.add, plain, bias)
    narrow = {"float32": float, "bfloat16": scalar.bf16, "float16": scalar.half}[np.dtype(dtype).name]
    for added, expected in ((None, plain), (bias, with_bias)):
        found = nv.matmul(a, b, bias=added, out_dtype=dtype)
        assert found.dtype == dtype
        same_bits(found.astype(np.float32), each(narrow, expected))
    c = random(16, 32, 9)[:, :24]
    summed = nv.matmul(a, b, beta=0.5, c=c, bias=bias.astype(bfloat16), out_dtype=dtype)
    expected = each(scalar.add, nv.matmul(a, b, beta=0.5, c=c), bias.astype(bfloat16).astype(np.float32))
    same_bits(summed.astype(np.float32), each(narrow, expected))


@pytest.mark.parametrize("headroom", [16 / 17, 0.5])
def test_headroom_is_in_alpha(headroom: float) -> None:
    """What amax was mapped to is what alpha divides by"""
    ar = nv.arithmetic("te", headroom=headroom)
    a, b = nv.quantize(random(7, 64), arithmetic=ar), nv.quantize(random(9, 64, 1))
    factor = scalar.div(1.0, scalar.fl(Fraction(6 * headroom * 448 * 2688)))
    alpha = scalar.mul(scalar.mul(float(a.amax), float(b.amax)), factor)
    found = nv.matmul(a, b)
    same_bits(found, each(scalar.mul, gemm.accumulate(a, b), alpha))
    exact = nv.dequantize(a).astype(np.float64) @ nv.dequantize(b).T.astype(np.float64)
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()


def test_overflow_of_the_output() -> None:
    a = tensor(np.full((1, 32), 7), 0x7E, 3e20)
    assert np.isinf(nv.matmul(a, a, out_dtype=bfloat16).astype(np.float32)).all()
    assert np.isinf(nv.matmul(a, a)).all()


# -- row-scaled ------------------------------------------------------------------------------------------------


ROW_SCALED = nv.arithmetic("te", row_scaled=True)


@pytest.mark.parametrize("form", ["pytorch", "jax"])
@pytest.mark.parametrize(("rows_a", "rows_b"), [(True, False), (False, True), (True, True)])
def test_row_scaled(rows_a: bool, rows_b: bool, form: str) -> None:
    """GEMM-ALPHA: amaxes of one in the GEMM; one side fl(out·fl(row·column)), both fl(fl(out·row)·column)"""
    x, y = decades(16, 64, low=-3, high=3), decades(24, 64, 3, low=-3, high=3)
    a = nv.quantize(x, arithmetic=ROW_SCALED if rows_a else "te")
    b = nv.quantize(y, arithmetic=ROW_SCALED if rows_b else "four-over-six")
    factor = slow_alpha(a, b, 0.5, form, (1.0, 1.0))
    out = each(scalar.mul, gemm.accumulate(a, b), factor)
    rows, columns = np.broadcast_to(a.amax.reshape(-1, 1), (16, 24)), np.broadcast_to(b.amax, (16, 24))
    if rows_a and rows_b:
        expected = each(lambda o, r, c: scalar.mul(scalar.mul(o, r), c), out, rows, columns)
    else:
        expected = each(lambda o, r, c: scalar.mul(o, scalar.mul(r, c)), out, rows, columns)
    same_bits(nv.matmul(a, b, alpha=0.5, alpha_form=form), expected)
    bias, c = random(1, 32, 5)[0, :24], random(16, 32, 6)[:, :24]
    expected = each(scalar.bf16, each(scalar.add, expected, bias))
    found = nv.matmul(a, b, alpha=0.5, alpha_form=form, bias=bias, out_dtype=bfloat16)
    same_bits(found.astype(np.float32), expected)
    # accumulation follows the rounding of the output
    expected = each(lambda o, v: scalar.bf16(scalar.add(o, v)), expected, c)
    found = nv.matmul(a, b, alpha=0.5, alpha_form=form, bias=bias, beta=1.0, c=c, out_dtype=bfloat16)
    same_bits(found.astype(np.float32), expected)


def test_one_row_is_a_tensor_scale() -> None:
    """A single row's amax folds into one factor, as a tensor's does"""
    a, b = nv.quantize(random(1, 64), arithmetic=ROW_SCALED), nv.quantize(random(24, 64, 1), arithmetic=ROW_SCALED)
    factor = each(scalar.mul, np.broadcast_to(a.amax, 24), b.amax)
    out = each(scalar.mul, gemm.accumulate(a, b), slow_alpha(a, b, 1.0, "pytorch", (1.0, 1.0)))
    same_bits(nv.matmul(a, b), each(scalar.mul, out, factor))


def test_without_alpha_row_amaxes_are_not_applied() -> None:
    a, b = nv.quantize(random(16, 64), arithmetic=ROW_SCALED), nv.quantize(random(24, 64, 1))
    same_bits(nv.matmul(a, b, alpha_form="none"), gemm.accumulate(a, b))
    c = random(16, 32, 6)[:, :24]
    found = nv.matmul(a, b, alpha_form="none", beta=1.0, c=c)
    same_bits(found, each(lambda t, v: fma(t, 1.0, v), gemm.accumulate(a, b), c))


# -- operands --------------------------------------------------------------------------------------------------


def test_columnwise_operands() -> None:
    """wgrad's product: both operands along their first axis"""
    dy, x = random(64, 48), random(64, 80, 1)
    found = nv.matmul(nv.quantize(dy, axis=0), nv.quantize(x, axis=0))
    same_bits(found, nv.matmul(nv.quantize(dy.T.copy()), nv.quantize(x.T.copy())))
    assert found.shape == (48, 80)


def test_leading_dimensions_are_rows() -> None:
    x, w = random(12, 64), random(8, 64, 1)
    weight = nv.quantize(w)
    same_bits(nv.matmul(nv.quantize(x.reshape(3, 4, 64)), weight), nv.matmul(nv.quantize(x), weight))


def test_other_packings() -> None:
    """High nibble first decodes as its arithmetic says"""
    q, w = nv.quantize(random(8, 64)), nv.quantize(random(8, 64, 1))
    swapped = nv.NVFP4Tensor.from_arrays(
        (q.packed >> 4 | q.packed << 4).astype(np.uint8), q.scales, q.amax,
        arithmetic=nv.arithmetic("te", packing="high-nibble-first"),
    )  # fmt: skip
    same_bits(nv.matmul(swapped, w), nv.matmul(q, w))


def test_it_is_near_the_real_product() -> None:
    x, w = random(64, 512), random(64, 512, 1)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    found = nv.matmul(nv.quantize(x), nv.quantize(w)).astype(np.float64)
    assert np.linalg.norm(found - exact) < 0.15 * np.linalg.norm(exact)
    decoded = nv.dequantize(nv.quantize(x), np.float32).astype(np.float64) @ nv.dequantize(nv.quantize(w)).T
    assert np.linalg.norm(found - decoded) < 1e-6 * np.linalg.norm(exact)


# -- errors ----------------------------------------------------------------------------------------------------

A, B = nv.quantize(random(16, 64)), nv.quantize(random(32, 64, 1))
ODD = nv.quantize(random(16, 48))
C = np.zeros((16, 32), np.float32)


@pytest.mark.parametrize(
    ("given_options", "error", "message"),
    [
        ({"b": nv.quantize(random(32, 96))}, ValueError, r"a \(16, 64\) and b \(32, 96\) have different K .*axis=0"),
        ({"a": ODD, "b": ODD}, ValueError, "K is a multiple of 32 .* got 48: pad"),
        ({"a": random(16, 64)}, TypeError, "expected an NVFP4Tensor .* got ndarray"),
        ({"b": None}, TypeError, "expected an NVFP4Tensor .* got NoneType"),
        ({"model": "sm_90"}, ValueError, "unknown tensor core model 'sm_90'; the models are blackwell, "),
        ({"alpha_form": "cutlass"}, ValueError, "unknown alpha form 'cutlass'; the forms are pytorch, grouped, jax, "),
        ({"out_dtype": np.float64}, TypeError, "matmul gives float32, bfloat16 or float16; got float64"),
        ({"out_dtype": ml_dtypes.float8_e4m3fn}, TypeError, "matmul gives float32, bfloat16 or float16"),
        ({"beta": 1.0}, ValueError, "beta is not 0, so c is needed: a float array of the output's shape"),
        ({"beta": 1.0, "c": C.T}, ValueError, r"c has the output's shape \(16, 32\); got \(32, 16\)"),
        ({"bias": np.zeros(16, np.float32)}, ValueError, r"one value for each of the 32 columns; got shape \(16,\)"),
        ({"split_k": 2}, ValueError, "split_k is an integer from 1 to the 1 words of 64 along K; got 2"),
        ({"split_k": 0}, ValueError, "split_k is an integer"),
        ({"split_k": 1.0}, ValueError, "split_k is an integer"),
        ({"threads": 0}, ValueError, "threads is a positive integer or None; got 0"),
        ({"threads": "2"}, ValueError, "threads is a positive integer or None"),
    ],
)  # fmt: skip
def test_errors(given_options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        nv.matmul(**{"a": A, "b": B, **given_options})
    assert "\n" not in str(caught.value)


def test_c_is_not_needed_without_beta() -> None:
    same_bits(nv.matmul(A, B, c=C), nv.matmul(A, B))


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_factor_is_one_number(name: str) -> None:
    q = nv.quantize(np.ones((16, 64), np.float32))
    for value in ("2", np.ones(3, np.float32)):
        with pytest.raises(TypeError, match=f"{name} is one number"):
            nv.matmul(q, q, **{name: value})
