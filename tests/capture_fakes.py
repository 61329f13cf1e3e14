"""Backends for the tests of capture: an installed package of fakes that behave, depart, crash, hang and talk.

``install`` lays the package where entry points are found, as a third party's would be; this file is its module.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import nvfp4ref as nv
from nvfp4hw.backends.base import Case, Outputs

MODULE = "capture_fakes"
CASES = 8


def install(site: Path) -> None:
    """The package as a folder to be put on sys.path."""
    info = site / f"{MODULE}-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(__file__, site / f"{MODULE}.py")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n", encoding="utf-8")
    points = [f"{cls.name} = {MODULE}:{cls.__name__}" for cls in FAKES]
    points += ["fake-unimportable = capture_fakes_not_there:Backend", "fake-none = json:dumps"]
    (info / "entry_points.txt").write_text("[nvfp4.backends]\n" + "\n".join(points) + "\n", encoding="utf-8")


class Good:
    """Right, on small cases of its own."""

    name = "fake-good"
    preset = "te"
    features = frozenset(("quantize", "float32", "1x16", "row"))

    def availability(self) -> str | None:
        return None

    def version(self) -> str:
        return f"fake {os.environ.get('FAKE_VERSION', '1.0')}"

    def cases(self, suite: str) -> Iterable[Case] | None:
        bits = np.random.PCG64(5).random_raw(CASES * 256).reshape(CASES, 16, 16)
        x = ((bits >> np.uint64(40)).astype(np.float32) - np.float32(2.0**23)) * np.float32(2.0**-22)
        return [Case(f"fake/{n}", "fake", x[n], hunts="nothing") for n in range(CASES)]

    def quantize(self, case: Case) -> Outputs:
        q = nv.quantize(case.x)
        return {"packed": q.packed, "scales": q.scales, "amax": q.amax}


class _AtThree(Good):
    """Right but at the fourth case."""

    def quantize(self, case: Case) -> Outputs:
        if case.id == "fake/3":
            self.fault()
        return super().quantize(case)

    def fault(self) -> None:
        raise NotImplementedError


class Raises(_AtThree):
    name = "fake-raises"

    def fault(self) -> None:
        raise RuntimeError("no kernel image\nis available")


class Segfault(_AtThree):
    name = "fake-segfault"

    def fault(self) -> None:
        ctypes.string_at(0)


class Exits(_AtThree):
    name = "fake-exits"

    def fault(self) -> None:
        print("terminate called without an active exception")
        sys.stdout.flush()
        os._exit(134)


class Hangs(_AtThree):
    """Holds the interpreter's lock, and ignores a polite signal."""

    name = "fake-hangs"

    def fault(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(600)


class LosesDevice(_AtThree):
    """Every call after the fourth fails too, until there is a new process."""

    name = "fake-loses-device"
    _lost = False

    def quantize(self, case: Case) -> Outputs:
        self._lost = self._lost or case.id == "fake/3"
        if self._lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Good.quantize(self, case)


class AlwaysDies(Good):
    name = "fake-always-dies"

    def quantize(self, case: Case) -> Outputs:
        ctypes.string_at(0)
        return {}


class DiesWhenAsked(Good):
    name = "fake-dies-when-asked"

    def availability(self) -> str | None:
        ctypes.string_at(0)
        return None


class DiesAtExit(Good):
    name = "fake-dies-at-exit"

    def quantize(self, case: Case) -> Outputs:
        import atexit

        atexit.register(ctypes.string_at, 0)
        return super().quantize(case)


class WrongDriver(Good):
    name = "fake-wrong-driver"

    def availability(self) -> str | None:
        raise ImportError("libcuda.so.1: version `R999' not found")


class Absent(Good):
    name = "fake-absent"

    def availability(self) -> str | None:
        return "not installed: fake (pip install fake)"


class Garbage(Good):
    """Writes whatever it likes to both streams, a lot of it."""

    name = "fake-garbage"

    def quantize(self, case: Case) -> Outputs:
        os.write(1, b"\x00\xff{]\n\x1b[2J" * 20000)
        os.write(2, b'{"id": "fake/0"}\n' * 1000)
        return super().quantize(case)


class Odd(Good):
    """Outputs that no bundle can hold, or none at all."""

    name = "fake-odd"

    def quantize(self, case: Case) -> Outputs:
        right = super().quantize(case)
        odd: dict[str, Any] = {
            "fake/0": {},
            "fake/1": {"packed": np.array([object()])},
            "fake/2": {
                "packed": right["packed"][:, ::-1],
                "scales": right["scales"],
                "amax": right["amax"].astype(">f4"),
            },
            "fake/3": {"vibes": np.zeros(3)},
            "fake/4": {**right, "packed": np.asfortranarray(right["packed"])},
        }
        return odd.get(case.id, right)


class Wrong(Good):
    """Every other code is wrong."""

    name = "fake-wrong"

    def quantize(self, case: Case) -> Outputs:
        right = super().quantize(case)
        return {**right, "packed": right["packed"] ^ np.uint8(1)}


class Slow(Good):
    name = "fake-slow"

    def quantize(self, case: Case) -> Outputs:
        time.sleep(0.15)
        return super().quantize(case)


FAKES: tuple[type[Good], ...] = (
    *(Good, Raises, Segfault, Exits, Hangs, LosesDevice, AlwaysDies, DiesWhenAsked, DiesAtExit, WrongDriver),
    *(Absent, Garbage, Odd, Wrong, Slow),
)
