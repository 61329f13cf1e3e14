"""The exact witnesses W1 to W5, in rational arithmetic: nothing is sampled, nothing has a tolerance.

    python docs/studies/witnesses.py [--write]

Codes come from the oracle; every number around them is a Fraction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

import nvfp4ref as nv
from nvfp4ref import e2m1, e4m3

import pages  # isort: skip

F = Fraction
GRID = [F(v) for v in e2m1.MAGNITUDES]
E4M3 = [F(float(v)) for v in e4m3.VALUES[:127]]
HEADROOM = F(16, 17)


def rounded(code: int) -> Fraction:
    """The exact value of an E2M1 code."""
    return F(float(e2m1.VALUES[code]))


def nearest(x: Fraction) -> Fraction:
    """E2M1 nearest even, by the oracle; x must be a float32 value."""
    single = np.float32(float(x))
    if F(float(single)) != x:
        raise ValueError(f"{x} is no float32")
    return rounded(int(e2m1.encode(np.array([single]))[0]))


def between(x: Fraction) -> tuple[Fraction, Fraction]:
    """The two grid values around a magnitude up to 6."""
    low = max(v for v in GRID if v <= x)
    return low, min((v for v in GRID if v > x), default=low)


def expectation(pieces: Iterator[tuple[Fraction, Fraction]] | list[tuple[Fraction, Fraction]]) -> Fraction:
    """Σ probability·value; the probabilities must add up to 1."""
    found = list(pieces)
    assert sum((p for p, _ in found), F(0)) == 1
    return sum((p * v for p, v in found), F(0))


# -- W1 --------------------------------------------------------------------------------------------------------------


def presented(top: int) -> Fraction:
    """What the branch that maps to ``top`` hands to stochastic rounding for the entry 1: top·16/17.

    The block's scale is the largest one, which rounds to itself, so the branch decodes by 1/presented.
    """
    return top * HEADROOM


def branch(top: int, t: Fraction) -> Fraction:
    """The decoded entry of a branch for the coin t in [0, 1): up when t is below the fraction."""
    y = presented(top)
    low, high = between(y)
    up = (y - low) / (high - low)
    return (high if t < up else low) / y


def w1() -> dict[str, Fraction]:
    """4over6 with stochastic rounding, one coin for both candidates: means of each branch and of what is chosen."""
    edges = {F(0), F(1)}
    for top in (4, 6):
        low, high = between(presented(top))
        edges.add((presented(top) - low) / (high - low))
    cuts = sorted(edges)
    found: dict[str, list[tuple[Fraction, Fraction]]] = {"4": [], "6": [], "chosen": []}
    for a, b in zip(cuts, cuts[1:], strict=False):
        four, six = branch(4, a), branch(6, a)  # constant on [a, b)
        chosen = four if (four - 1) ** 2 <= (six - 1) ** 2 else six
        for key, value in (("4", four), ("6", six), ("chosen", chosen)):
            found[key].append((b - a, value))
    return {key: expectation(pieces) for key, pieces in found.items()}


# -- W2 --------------------------------------------------------------------------------------------------------------


def w2(reach: Fraction) -> Fraction:
    """MS-EDEN of x = e0 + e1/10: the mean of the first entry of what comes back.

    In any dimension 16·2^k the transform makes of x entries ±11/10 and ±9/10, eight of each in every group of 16 (up
    to the common factor 1/√d and signs, both undone at the end), whatever the random signs are.  The scale of a group
    is its largest entry over ``reach``, and 256 times that over the tensor's is 256 exactly.
    """
    large, small = F(11, 10), F(9, 10)
    unit = large / reach  # of one group, and so of all
    values = {}
    for v in (large, small):
        # E2M1 of v/unit: exact when it is no tie and not next to one, which is checked
        y = v / unit
        assert all(abs(y - F(m)) > F(1, 100) for m in e2m1.MIDPOINTS)
        values[v] = rounded(int(e2m1.encode(np.array([np.float32(float(y))]))[0])) * unit
    correction = (8 * large**2 + 8 * small**2) / (8 * large * values[large] + 8 * small * values[small])
    # E4M3 of correction·256, stochastically: in range, so that its mean is correction·256
    assert E4M3[1] < correction * 256 < 448
    back = {v: correction * values[v] for v in values}
    # the inverse transform's first entry: the mean over entries of sign·value, the sign being that of e0's part
    return (back[large] + back[small]) / 2


# -- W3 --------------------------------------------------------------------------------------------------------------


def w3() -> tuple[Fraction, Fraction, Fraction]:
    """(least ratio of nearest E4M3 to a normal value, the same to a subnormal one, E4M3 of 3·2^-10 over it).

    Between two codes the ratio to the lower one falls until the midpoint, so the least is there or just below it.
    """

    def least(codes: range) -> Fraction:
        found = []
        for code in codes:
            middle = (E4M3[code] + E4M3[code + 1]) / 2
            found.append(E4M3[code] / middle)  # reached at the tie when the lower code is even, else approached
            if code % 2 == 0:
                tie = int(e4m3.encode(np.array([np.float32(float(middle))]))[0])
                assert tie == code, "a tie goes to the even code"
        return min(found)

    three = F(3, 2**10)
    code = int(e4m3.encode(np.array([np.float32(float(three))]))[0])
    return least(range(8, 126)), least(range(1, 8)), E4M3[code] / three


# -- W4, W5 ----------------------------------------------------------------------------------------------------------


def w4() -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Of a block whose amax is 3 + δ, δ = 1/8: MXFP4's scale and value by ceil, NVFP4's code value and decoded amax."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 3.125
    m = nv.mxfp4.quantize(x, scale="ceil")
    q = nv.quantize(x)
    scale = F(2) ** (int(m.scales[0, 0]) - 127)
    return scale, rounded(int(m.codes[0, 0])), rounded(int(q.codes[0, 0])), F(float(nv.dequantize(q)[0, 0]))


TIES = [F(m) for m in e2m1.MIDPOINTS]


def w5() -> dict[str, list[Fraction]]:
    """The seven ties under nearest even and away from zero, and torch.round's rule scaled as fouroversix does."""
    x = np.array([float(t) for t in TIES], np.float32)
    by_rint = [F(float(np.rint(np.float32(t / s)) * np.float32(s))) for t, s in zip(x, _steps(x), strict=True)]
    return {
        "nearest even": [rounded(int(c)) for c in e2m1.encode(x)],
        "ties away": [rounded(int(c)) for c in e2m1.encode(x, "ties-away")],
        "rint on the grid step": by_rint,
    }


def _steps(x: np.ndarray) -> list[float]:
    return [0.5 if v < 2 else 1.0 if v < 4 else 2.0 for v in x]


def numbers() -> str:
    """The page's table."""
    one, (normal, subnormal, three), (scale, code3, code6, decoded) = w1(), w3(), w4()
    reaches = [6 * HEADROOM, F(6), 6 * HEADROOM / F(93, 100)]
    ties = w5()

    def show(values: list[Fraction]) -> str:
        return ", ".join(f"{float(v):g}" for v in values)

    rows = [
        ("W1", "mean of branch 4, of branch 6", "1, 1", f"{one['4']}, {one['6']}", ""),
        ("W1", "mean of what 4over6 with SR and one coin chooses", "65/64", one["chosen"], ""),
        ("W2", "MS-EDEN of e0 + e1/10, first entry, any 16·2^k", "101/102", ", ".join(str(w2(r)) for r in reaches), ""),
        ("W3", "least E4M3(v)/v, v normal", "16/17", normal, ""),
        ("W3", "v subnormal, above half the least", "fails", f"{subnormal} approached", ""),
        ("W3", "E4M3(3·2⁻¹⁰)/(3·2⁻¹⁰)", "2/3", three, "**not right**"),
        ("W4", "amax 3 + 1/8 under MXFP4 ceil: scale, code", "1, 3", f"{scale}, {code3}", ""),
        ("W4", "the same under NVFP4: code, decoded", "6", f"{code6}, {decoded}", ""),
        ("W5", f"nearest even of {show(TIES)}", "0, 1, 1, 2, 2, 4, 4", show(ties["nearest even"]), ""),
        ("W5", "ties away", "0.5, 1, 1.5, 2, 3, 4, 6", show(ties["ties away"]), ""),
        ("W5", "rint on the grid step (torch.round)", "as nearest even", show(ties["rint on the grid step"]), ""),
    ]
    return pages.table(("", "what", "stated", "here, exactly", ""), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Exact witnesses.")
    parser.add_argument("--write", action="store_true", help="write the page's numbers")
    if parser.parse_args().write:
        pages.fill("witnesses.md", {"numbers": numbers()})
    else:
        print(numbers())
    return 0


if __name__ == "__main__":
    sys.exit(main())
