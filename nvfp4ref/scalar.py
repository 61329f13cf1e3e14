"""NVFP4 one number at a time: the slow twin of the vectorised rooms, which reads like the specification.

Numbers are Python floats that hold float32 values; every operation is computed exactly in rationals and
rounded once by :func:`fl`, so nothing here leans on NumPy, on the processor's rounding or on a library cast.
Tests prove it equal to the fast path: over every code and threshold, every bfloat16 and float16 pattern, and
by property elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from .arithmetic import Arithmetic
from .rcp import corrections

Operation = Callable[[float, float], float]
NAN, INF = math.nan, math.inf
FLT_MAX = (2 - 2.0**-23) * 2.0**127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# -- float32 arithmetic, rule FP32-RULES ---------------------------------------------------------------


def round_to_format(value: Fraction, precision: int, emin: int, emax: int) -> float:
    """Nearest value with ``precision`` significant bits, ties to even; subnormal below 2^emin, Inf past emax."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, emin) - precision + 1)
    nearest = round(magnitude / unit) * unit  # Python rounds a Fraction's half to even
    result = INF if nearest >= Fraction(2) ** (emax + 1) else float(nearest)
    return math.copysign(result, value)


def fl(value: Fraction) -> float:
    """One rounding to float32."""
    return round_to_format(value, 24, -126, 127)


def next_float32(x: float, step: int) -> float:
    """The next float32 away from (1) or toward (−1) zero of a number; NaN, Inf and zero as nextafter has them."""
    if math.isnan(x) or (math.isinf(x) and step > 0) or (x == 0 and step < 0):
        return x
    if math.isinf(x):
        return math.copysign(FLT_MAX, x)
    unit = 2.0 ** (max(math.frexp(x)[1] - 1, -126) - 23) if x else 2.0**-149
    if step < 0 and abs(math.frexp(x)[0]) == 0.5 and abs(x) > 2.0**-126:
        unit /= 2
    return fl(Fraction(x) + (Fraction(unit) if step > 0 else -Fraction(unit)) * int(_sign(x)))


def bf16(x: float) -> float:
    """A float32 value rounded to bfloat16."""
    return round_to_format(Fraction(x), 8, -126, 127) if math.isfinite(x) and x != 0 else x


def half(x: float) -> float:
    """A float32 value rounded to float16."""
    return round_to_format(Fraction(x), 11, -14, 15) if math.isfinite(x) and x != 0 else x


def _sign(x: float) -> float:
    return math.copysign(1.0, x)


def mul(a: float, b: float) -> float:
    """float32 a·b."""
    if math.isnan(a) or math.isnan(b):
        return NAN
    sign = _sign(a) * _sign(b)
    if math.isinf(a) or math.isinf(b):
        return NAN if a == 0 or b == 0 else sign * INF
    return math.copysign(abs(fl(Fraction(a) * Fraction(b))), sign)


def div(a: float, b: float) -> float:
    """float32 a/b."""
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return NAN
    sign = _sign(a) * _sign(b)
    if math.isinf(a) or b == 0:
        return sign * INF
    if math.isinf(b):
        return sign * 0.0
    return math.copysign(abs(fl(Fraction(a) / Fraction(b))), sign)


def rcp(y: float) -> float:
    """A GPU's approximate reciprocal of a number that is not subnormal and whose reciprocal is not."""
    if y == 0 or math.isinf(y) or math.isnan(y):
        return div(1.0, y)
    fraction, exponent = math.frexp(abs(y))
    significand = 2 * fraction
    ulp = int(corrections()[int((significand - 1) * 2**23)])
    inverse = fl(1 / Fraction(significand))
    return math.ldexp(next_float32(inverse, ulp) if ulp else inverse, 1 - exponent) * _sign(y)


def div_full(a: float, b: float) -> float:
    """CUDA's div.full: a·rcp(b), both multiplied by 2^24 where b is subnormal and by 1/4 where it is above 2^126."""
    factor = 2.0**24 if abs(b) < 2.0**-126 else 0.25 if abs(b) > 2.0**126 else 1.0
    return mul(mul(a, factor), rcp(mul(b, factor)))


def add(a: float, b: float) -> float:
    """float32 a+b."""
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b):
        return a + b
    total = Fraction(a) + Fraction(b)
    return fl(total) if total else a + b  # the sum of two zeros, or of x and −x, has IEEE's sign


def sub(a: float, b: float) -> float:
    """float32 a−b."""
    return add(a, -b)


def fmin(a: float, b: float) -> float:
    """CUDA's fminf: the operand that is not NaN wins."""
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def min_nan(a: float, b: float) -> float:
    """min.NaN: NaN wins."""
    return NAN if math.isnan(a) or math.isnan(b) else min(a, b)


def flush(x: float) -> float:
    """A subnormal as the zero of its sign."""
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def operations(ar: Arithmetic) -> tuple[Operation, Operation]:
    """(product, quotient) of an arithmetic: its division, and subnormals flushed before and after where it does."""
    quotient = {"ieee": div, "rcp-approx": div_full}[ar.division]
    if not ar.flush_subnormals:
        return mul, quotient
    return (lambda a, b: flush(mul(flush(a), flush(b)))), (lambda a, b: flush(quotient(flush(a), flush(b))))


def through(x: float, dtype: str | None) -> float:
    """A value rounded to "bfloat16" or "float16"; "float32" and None change nothing."""
    return {"bfloat16": bf16, "float16": half}.get(dtype or "", lambda v: v)(x)


# -- codes, rules E2M1-*, E4M3-* ------------------------------------------------------------------------


def e2m1_decode(code: int) -> float:
    """Value of an E2M1 code 0..15."""
    magnitude = MAGNITUDES[code & 7]
    return -magnitude if code & 8 else magnitude


def e2m1_encode(y: float, ar: Arithmetic) -> int:
    """Code of a scaled element: nearest, ties to the even index, saturating, sign of zero kept, NaN to 7."""
    y = through(y, ar.element_via)
    if math.isnan(y):
        return ar.nan_code
    magnitude = abs(y)
    if magnitude >= 7 and not ar.saturate:
        return ar.nan_code if math.isinf(y) else 8
    index = 7
    for low in range(7):
        if magnitude < MAGNITUDES[low + 1]:
            midpoint = (MAGNITUDES[low] + MAGNITUDES[low + 1]) / 2
            up = {
                "nearest-even": magnitude > midpoint or (magnitude == midpoint and low % 2 == 1),
                "ties-away": magnitude >= midpoint,
                "ties-to-zero": magnitude > midpoint,
                "truncate": False,
            }[ar.element_rounding]
            index = low + 1 if up else low
            break
    negative = _sign(y) < 0
    if ar.negative_zero == "drop" and index == 0:
        negative = False
    if ar.negative_zero == "drop-exact" and y == 0:
        negative = False
    return index + 8 * negative


def e4m3_decode(byte: int) -> float:
    """Value of an E4M3 byte."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return NAN
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 0x80 else magnitude


_TO_INTEGER: dict[str, Callable[[Fraction], int]] = {
    "nearest-even": round,
    "half-up": lambda q: math.floor(q + Fraction(1, 2)),
    "up": math.ceil,
    "truncate": math.floor,
}


def e4m3_encode(x: float, ar: Arithmetic) -> int:
    """Byte of a block scale: nearest, ties to the even code, saturating at 448, NaN to 0x7F."""
    if math.isnan(x):
        return ar.scale_nan_byte
    sign = 0x80 if _sign(x) < 0 else 0
    magnitude = abs(x)
    rounding = ar.scale_rounding
    if rounding == "power-of-two":
        rounding = "nearest-even"
        if math.isfinite(x) and x > 0:
            fraction, exponent = math.frexp(x)
            magnitude = 2.0 ** (exponent - (fraction == 0.5))
    if math.isinf(magnitude):
        code = 0x7F
    else:
        exponent = max(math.frexp(magnitude)[1] - 1, -6) if magnitude else -6
        units = _TO_INTEGER[rounding](Fraction(magnitude) / Fraction(2) ** (exponent - 3))
        code = min((exponent + 6) * 8 + units, 0x7F)
    if ar.scale_overflow == "nan-above-240":
        return ar.scale_nan_byte if code >= 0x78 else sign | code if code >= 8 else 0
    if code == 0x7F and ar.scale_overflow == "saturate":
        code = 0x7E
    return sign | code


# -- amax, rules AMAX-NAN, BLOCK-AMAX --------------------------------------------------------------------


def amax(elements: Iterable[float], nan: str) -> float:
    """max(abs(x)) from +0; NaN ignored, or propagated; "tree": halves against halves by (u > v ? u : v)."""
    magnitudes = [abs(x) for x in elements]
    if nan == "tree":
        while len(magnitudes) > 1:
            middle = len(magnitudes) // 2
            magnitudes = [u if u > v else v for u, v in zip(magnitudes[:middle], magnitudes[middle:], strict=True)]
        return -INF if math.isnan(magnitudes[0]) else magnitudes[0]
    if nan == "propagate" and any(math.isnan(m) for m in magnitudes):
        return NAN
    return max((m for m in magnitudes if not math.isnan(m)), default=0.0)


def tile_amax(tile: Sequence[Sequence[float]], s: float, d: float, nan: str, ar: Arithmetic) -> float:
    """The amax of one block (one row) or 16x16 tile (16 rows), of x, fl(x·S) or fl(x/D)."""
    mul, div = operations(ar)
    largest = []
    for row in tile:
        if ar.block_scale in ("prescaled", "prescaled-times-sixth"):
            row = [mul(x, s) for x in row]
        elif ar.block_scale == "predivided-times-sixth":
            row = [div(x, d) for x in row]
        elif ar.flush_subnormals:
            row = [flush(x) for x in row]
        if ar.block_amax == "signed":
            row = [x if math.isnan(x) else max(x, 0.0) for x in row]
        largest.append(amax(row, nan))
    if len(largest) == 1:
        return largest[0]
    return max(largest) if nan == "tree" else amax(largest, nan)


# -- scales, rules SCALE-* ------------------------------------------------------------------------------


def global_scale(a: float, ar: Arithmetic) -> tuple[float, float]:
    """(S, D): te has S = fmin(fl(M/A), FLT_MAX), 1 if A or S is 0, and D = fl(1/S)."""
    mul, div = operations(ar)
    maximum = fl(Fraction(ar.element_max * ar.e4m3_max))
    if ar.global_scale == "none":
        return 1.0, 1.0
    if ar.global_scale == "reciprocal-form":
        d = div(a, maximum)
        return div(1.0, d), d
    if ar.global_scale == "product-form":
        d = mul(a, fl(1 / Fraction(maximum)))
        return div(1.0, d), d
    if ar.global_guard == "finite" and not math.isnan(a):
        a = max(a, 2.0**-14 if ar.global_type == "float16" else 2.0**-126)
    multiply = ar.global_scale == "reciprocal-then-multiply"
    s = mul(through(div(1.0, a), ar.global_type), maximum) if multiply else div(maximum, a)
    s = through(s, ar.global_type)
    if ar.global_guard == "te":
        s = fmin(s, FLT_MAX)
        s = 1.0 if a == 0 or s == 0 else s
    elif ar.global_guard == "fused-rht":
        s = min_nan(s, FLT_MAX) if a > 0 else 1.0
    elif ar.global_guard == "reference":
        s = min_nan(s, FLT_MAX)
        s = 1.0 if s == 0 else s
    elif ar.global_guard == "finite":
        s = s if math.isfinite(s) else 1.0
    elif ar.global_guard == "zero-amax":
        s = 1.0 if a == 0 else s
    d = reciprocal(s, ar)
    return (d, s) if ar.global_scale == "inverted" else (s, d)


def reciprocal(x: float, ar: Arithmetic) -> float:
    """fl(1/x), with the arithmetic's value for 1/0 where it guards that."""
    if x == 0 and ar.reciprocal_of_zero is not None:
        return fl(Fraction(ar.reciprocal_of_zero))
    return operations(ar)[1](1.0, x)


def block_scale(a: float, s: float, d: float, ar: Arithmetic) -> float:
    """Block scale before E4M3; te: fmin(fl(a·fl(S·fl(1/6))), FLT_MAX)."""
    mul, div = operations(ar)
    six = fl(Fraction(ar.element_max))
    sixth = fl(1 / Fraction(six))
    value = {
        "amax-times-sixth-of-scale": lambda: mul(a, mul(s, sixth)),
        "divide-by-6": lambda: mul(through(div(a, six), ar.sixth_type), s),
        "scale-then-sixth": lambda: mul(s, mul(a, sixth)),
        "divide-by-product": lambda: div(a, mul(six, d)),
        "divide-twice": lambda: div(div(a, six), d),
        "sixth-then-divide": lambda: div(mul(a, sixth), d),
        "prescaled": lambda: div(a, six),
        "prescaled-times-sixth": lambda: mul(a, sixth),
        "predivided-times-sixth": lambda: mul(a, sixth),
    }[ar.block_scale]()
    limit = {"float32-max": FLT_MAX, "e4m3-max": 448.0, "none": None}[ar.block_scale_max]
    if limit is None:
        return value
    return (fmin if ar.block_scale_nan == "drop" else min_nan)(value, limit)


def scale_byte(value: float, a: float, s: float, ar: Arithmetic) -> int:
    """The stored E4M3 byte of a block scale."""
    floored = ar.scale_floor if ar.scale_floor is not None and value <= ar.scale_floor else value
    byte = e4m3_encode(floored, ar)
    if math.isnan(value) and not math.isnan(a) and not math.isnan(s):
        byte = ar.scale_invalid_byte
    zero = {
        "amax": a == 0,
        "block-scale": value == 0,
        "small-block-scale": value < 2.0**-63,
        "byte": byte == 0,
    }[ar.zero_block_rule]
    return ar.zero_block_scale if zero and ar.zero_block_scale is not None else byte


def encode_scale(byte: int, value: float, s: float, d: float, ar: Arithmetic) -> float:
    """Multiplier (or divisor) of a block's elements; te: fmin(fl(1/fl(d·D)), FLT_MAX)."""
    mul, div = operations(ar)
    b = value if ar.encode_scale == "unrounded-block-scale" else e4m3_decode(byte)
    limit = fmin if ar.encode_nan == "drop" else min_nan
    e = {
        "reciprocal-of-product": lambda: reciprocal(mul(b, d), ar),
        "unrounded-block-scale": lambda: reciprocal(mul(b, d), ar),
        "quotient": lambda: div(s, b),
        "bfloat16-coefficient": lambda: div(s, b),
        "reciprocal-product": lambda: mul(s, reciprocal(b, ar)),
        "two-multiplications": lambda: reciprocal(b, ar),
        "divide-by-product": lambda: mul(b, d),
        "divide-by-quotient": lambda: div(b, s),
    }[ar.encode_scale]()
    if ar.encode_nan == "as-zero" and math.isnan(e):
        e = 0.0 if ar.encode_scale in ("divide-by-product", "divide-by-quotient") else INF
    if ar.encode_ulp:
        e = next_float32(e, ar.encode_ulp)
    if ar.encode_scale in ("divide-by-product", "divide-by-quotient") or ar.encode_max == "none":
        return e
    if ar.encode_scale == "bfloat16-coefficient":
        return bf16(limit(e, (2 - 2.0**-7) * 2.0**127))
    return limit(e, FLT_MAX)


def scale_element(x: float, e: float, s: float, ar: Arithmetic) -> float:
    """The scaled element; te: fl(x·e)."""
    mul, div = operations(ar)
    x = flush(x) if ar.flush_subnormals else x
    if ar.encode_scale in ("divide-by-product", "divide-by-quotient"):
        return div(x, e)
    if ar.encode_scale == "two-multiplications":
        return mul(mul(x, s), e)
    y = mul(x, e)
    if ar.encode_scale == "bfloat16-coefficient" and y == 0 and (x == 0 or e == 0):
        return 0.0  # fma(x, e, +0): an exact zero is +0, an underflow keeps its sign
    return y


# -- 4over6, rules FOUR-OVER-SIX-* ----------------------------------------------------------------------


def candidate(
    block: Sequence[float], factor: float, a: float, s: float, d: float, ar: Arithmetic
) -> tuple[int, list[float], list[int]]:
    """Scale byte, scaled elements and codes of a block mapped to 6 (factor 1) or 4 (factor 1.5)."""
    base = mul(div(a, 6.0), s)
    limit = fmin if ar.block_scale_nan == "drop" else min_nan
    byte = scale_byte(limit(mul(base, factor), 448.0), a, s, ar)
    e = div(1.0, mul(e4m3_decode(byte), d))
    if ar.encode_max != "none":
        e = (fmin if ar.encode_nan == "drop" else min_nan)(e, FLT_MAX)
    zero = byte == 0 and ar.zero_scale_elements == "zero"
    scaled = [0.0 if zero else mul(x, e) for x in block]
    return byte, scaled, [e2m1_encode(y, ar) for y in scaled]


def element_errors(
    block: Sequence[float],
    mapped: tuple[int, Sequence[float], Sequence[int]],
    tensor_amax: float,
    s: float,
    ar: Arithmetic,
) -> list[float]:
    """Error of each element of a candidate."""
    byte, scaled, codes = mapped
    errors = []
    for x, y, code in zip(block, scaled, codes, strict=True):
        q = e2m1_decode(code)
        if not ar.saturate and not abs(y) < 7:
            q = math.copysign(8.0, y) if math.isfinite(y) else NAN
        product = mul(q, e4m3_decode(byte))
        if ar.four_over_six_fast_error:
            difference = sub(product, mul(x, s))
        else:
            difference = sub(div(mul(product, tensor_amax), 6.0 * ar.e4m3_max), x)
        errors.append(abs(difference) if ar.four_over_six == "MAE" else mul(difference, difference))
    return errors


def sequential_sum(values: Sequence[float]) -> float:
    """Sum in order, from +0."""
    total = 0.0
    for value in values:
        total = add(total, value)
    return total


def torch_row_sum(values: Sequence[float]) -> float:
    """Sum of 16 or 256 values as torch's row sum adds them: 8 lanes, 4 accumulators."""
    accumulators = [[0.0] * 8 for _ in range(4)]
    for i, value in enumerate(values):
        lane = accumulators[i // 8 % 4]
        lane[i % 8] = add(lane[i % 8], value)
    return sequential_sum([sequential_sum([acc[k] for acc in accumulators]) for k in range(8)])


def tree_sum(values: Sequence[float]) -> float:
    """Sum of 1 or 16 errors, halves added onto halves."""
    tree = list(values)
    while len(tree) > 1:
        half_length = len(tree) // 2
        tree = [add(tree[i], tree[i + half_length]) for i in range(half_length)]
    return tree[0]


# -- a whole matrix -------------------------------------------------------------------------------------


def quantize(
    rows: Sequence[Sequence[float]],
    ar: Arithmetic,
    *,
    block: tuple[int, int] = (1, 16),
    given_amax: float | Sequence[float] | None = None,
    dtype: str = "float32",
) -> tuple[list[list[int]], list[list[int]]]:
    """Codes (R, K) and scale bytes (R, K/16) of a matrix of float32 values, rowwise, nearest even.

    ``given_amax`` replaces max(abs(x)), a sequence of one value a row when row-scaled; ``dtype`` is the
    type that the values came in.
    """
    ar = ar.for_input(dtype)
    nan = "ignore" if ar.amax_nan == "ignore" else "propagate"
    tree = ar.amax_nan == "xla-cpu" and len(rows) * len(rows[0]) >= 4096
    if ar.row_scaled:
        amaxes = list(given_amax) if isinstance(given_amax, Sequence) else [amax(row, nan) for row in rows]
    else:
        one = amax((x for row in rows for x in row), nan) if given_amax is None else given_amax
        assert isinstance(one, float)
        amaxes = [one] * len(rows)
    codes: list[list[int]] = [[] for _ in rows]
    scales: list[list[int]] = [[] for _ in rows]
    height = block[0]
    for top in range(0, len(rows), height):
        for left in range(0, len(rows[0]), 16):
            tile = [list(rows[r][left : left + 16]) for r in range(top, top + height)]
            partner = None
            if ar.amax_group == 32 and max(left, left ^ 16) < len(rows[0]):
                partner = [list(rows[r][left ^ 16 : (left ^ 16) + 16]) for r in range(top, top + height)]
            tile_codes, byte = quantize_tile(tile, amaxes[top], "tree" if tree else nan, ar, partner)
            for r, row_codes in enumerate(tile_codes):
                codes[top + r] += row_codes
                scales[top + r].append(byte)
    if height == 16 and ar.tile_scales == "tiled":
        scales = [scales[r % (len(rows) // 16) * 16] for r in range(len(rows))]
    return codes, scales


def quantize_tile(
    tile: Sequence[Sequence[float]],
    tensor_amax: float,
    nan: str,
    ar: Arithmetic,
    partner: Sequence[Sequence[float]] | None = None,
) -> tuple[list[list[int]], int]:
    """Codes and scale byte of one block (a single row) or one 16x16 tile; ``partner`` shares its amax."""
    s, d = global_scale(tensor_amax, ar)
    a = tile_amax(tile, s, d, nan, ar)
    if partner is not None:
        a = -fmin(-a, -tile_amax(partner, s, d, nan, ar))
    if ar.four_over_six:
        return _four_over_six(tile, a, tensor_amax, s, d, ar)
    value = block_scale(a, s, d, ar)
    byte = scale_byte(value, a, s, ar)
    if math.isnan(value) and ar.nan_block_codes is not None:
        code = ar.nan_block_codes[0 if math.isnan(tensor_amax) else 1 if math.isnan(a) else 2]
        return [[code] * len(row) for row in tile], byte
    e = encode_scale(byte, value, s, d, ar)
    if byte == 0 and ar.zero_scale_elements == "zero":
        return [[e2m1_encode(0.0, ar)] * len(row) for row in tile], byte
    return [[e2m1_encode(scale_element(x, e, s, ar), ar) for x in row] for row in tile], byte


def _four_over_six(
    tile: Sequence[Sequence[float]], a: float, tensor_amax: float, s: float, d: float, ar: Arithmetic
) -> tuple[list[list[int]], int]:
    found = []
    for factor in (1.5, 1.0):
        mapped = [candidate(row, factor, a, s, d, ar) for row in tile]
        errors = [element_errors(row, m, tensor_amax, s, ar) for row, m in zip(tile, mapped, strict=True)]
        if ar.four_over_six_sum == "torch-row-sum":
            total = torch_row_sum([error for row in errors for error in row])
        else:
            total = tree_sum([sequential_sum(row) for row in errors])
        found.append((total, mapped))
    (err4, four), (err6, six) = found
    chosen = four if err4 < err6 else six
    return [codes for _, _, codes in chosen], chosen[0][0]


# -- Hadamard, rules RHT-SUM, RHT-ROUND -------------------------------------------------------------------


def tensor_core_sum(products: Sequence[Fraction]) -> Fraction:
    """Finite exact products, each truncated to 25 bits below the largest's leading bit, summed, then cut to 24."""
    largest = max(abs(p) for p in products)
    if largest == 0:
        return Fraction(0)
    unit = _power_below(largest) / 2**25
    total = sum(math.trunc(p / unit) for p in products) * unit
    if total == 0:
        return Fraction(0)
    place = max(_power_below(abs(total)) / 2**23, Fraction(2) ** -149)
    return math.trunc(total / place) * place


def _power_below(value: Fraction) -> Fraction:
    """The largest power of two not above a positive value."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    power = Fraction(2) ** exponent
    return power if power <= value else power / 2


def hadamard_16(vector: Sequence[float], sign_mask: int) -> list[float]:
    """bfloat16 RHT of 16 finite bfloat16 values (size 16, normalised)."""
    result = []
    for j in range(16):
        products = []
        for i, x in enumerate(vector):
            negative = bin(i & j).count("1") + (sign_mask >> i & 1)
            products.append(Fraction(x) / 4 * (-1) ** negative)
        total = tensor_core_sum(products)
        result.append(round_to_format(total, 8, -126, 127))
    return result
