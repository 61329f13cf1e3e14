"""The largest element of every block, near FP8 precision: amax.json, amax.md and its figure.

python docs/studies/amax.py [--quick] [--write]
"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4ref import e4m3

import pages  # isort: skip

Array = np.ndarray[Any, Any]
BINS = np.linspace(0, 0.36, 73)
GROUPS = ("largest of each block", "others with code ±6", "codes ±4", "codes ±3", "smaller codes")


def bound() -> tuple[Fraction, Fraction]:
    """Largest relative error of a block's amax with a normal scale: (scale rounded down, rounded up), exactly.

    The amax over its decoded scale is 6·v/E4M3(v), which gets the code 6 while it is above 5, so the decoded amax is
    v's rounding off: between two codes the error is largest at the midpoint.
    """
    down, up = [], []
    values = [Fraction(float(v)) for v in e4m3.VALUES[8:127]]
    for low, high in zip(values, values[1:], strict=False):
        middle = (low + high) / 2
        assert 6 * middle / low > 5 and 6 * middle / high > 5
        down.append(1 - low / middle)
        up.append(high / middle - 1)
    return max(down), max(up)


def shares(x: Array) -> dict[str, Any]:
    """Of a normal tensor: elements by what they are, their relative error, and that of FP8."""
    q = nv.quantize(x)
    y, codes = nv.dequantize(q), q.codes & 7
    largest = np.zeros(x.shape, np.bool_).reshape(-1, 16)
    largest[np.arange(len(largest)), np.abs(x.reshape(-1, 16)).argmax(axis=1)] = True
    largest = largest.reshape(x.shape)
    there = x != 0
    error = np.abs(np.divide(y, x, out=np.ones_like(x), where=there) - 1)
    others = there & ~largest
    masks = (largest, others & (codes == 7), others & (codes == 6), others & (codes == 5), others & (codes < 5))
    fp8 = np.abs(np.divide(nv.fp8.quantize(x).dequantize(), x, out=np.ones_like(x), where=there) - 1)
    found = {
        name: {
            "share": float(mask.mean()),
            "rms": float(np.sqrt(np.square(error[mask], dtype=np.float64).mean())),
            "most": float(error[mask].max()),
            "histogram": np.histogram(error[mask], BINS)[0].tolist(),
        }
        for name, mask in zip(GROUPS, masks, strict=True)
    }
    normal = fp8[np.abs(x) > np.abs(x).max() * 2.0**-14]  # where E4M3 under this scale is not subnormal
    found["FP8 E4M3"] = {
        "share": 1.0,
        "rms": float(np.sqrt(np.square(normal, dtype=np.float64).mean())),
        "most": float(normal.max()),
        "histogram": np.histogram(normal, BINS)[0].tolist(),
    }
    found["code ±6"] = {"share": float((codes == 7).mean())}
    return found


def reproduce(side: int) -> dict[str, Any]:
    """Everything for one tensor of that side."""
    return {"side": side, "found": shares(np.random.default_rng(0).standard_normal((side, side), np.float32))}


def numbers(made: dict[str, Any]) -> str:
    """The page's table."""
    found = made["found"]
    rows = [
        (
            name,
            f"{100 * found[name]['share']:.2f}",
            f"{100 * found[name]['rms']:.2f}",
            f"{100 * found[name]['most']:.2f}",
        )
        for name in (*GROUPS, "FP8 E4M3")
    ]
    down, up = bound()
    table = pages.table(("elements", "share %", "rms relative error %", "largest %"), rows)
    six = 100 * found["code ±6"]["share"]
    return (
        f"{table}\n\nWith code ±6: **{six:.2f} %** of all elements. Largest error of an amax whose scale is normal, "
        f"exactly: {down} when the scale is rounded down, {up} when up."
    )


def draw(made: dict[str, Any]) -> Any:
    """Relative error by what an element is."""
    from nvfp4ref.study import figures

    figure, axes = figures.new(8, 3.8)
    for i, name in enumerate(("FP8 E4M3", *GROUPS[:4])):
        counts = np.array(made["found"][name]["histogram"], float)
        axes.stairs(100 * counts / counts.sum(), 100 * BINS, label=name, **figures.line(i))
    axes.set_xlim(0, 25)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("relative error |y/x − 1| (%)")
    axes.set_ylabel("elements of the kind, per 0.5 % (%)")
    figures.legend_below(figure, axes, 3)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="The largest element of each block.")
    parser.add_argument("--quick", action="store_true", help="a tensor of 512x512")
    parser.add_argument("--write", action="store_true", help="write the page's numbers and figure")
    options = parser.parse_args()
    made = reproduce(512 if options.quick else 4096)
    if options.write:
        pages.save("amax.json", made)
        pages.fill("amax.md", {"numbers": numbers(made)})
        pages.draw("amax", lambda: draw(made))
    else:
        print(numbers(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
