"""What the backends of installed packages share: is it there, which version, and the container of the arrays.

Nothing here computes; a backend adds the one call into its package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from nvfp4hw.backends.base import Case

Array = np.ndarray[Any, Any]

_FLOAT32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


class PackageBackend:
    """A backend that calls functions of one installed package.

    Class attributes: ``distributions`` are the names on PyPI of the packages that decide the bits, the first
    of them the quantizer's own; ``requirements`` those that must only be there; ``versions`` the first version of
    the first that has the calls and the first that was not read, as "2.15"; ``uses`` are the objects called, as
    "module:attribute" or "module"; ``install`` is the command that provides all of it.
    """

    name: str
    preset: str
    features: frozenset[str]
    distributions: ClassVar[tuple[str, ...]]
    requirements: ClassVar[tuple[str, ...]] = ()
    versions: ClassVar[tuple[str, str] | None] = None
    uses: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str]

    def availability(self) -> str | None:
        """None, or which package is missing or lacks the call, and the command that changes it."""
        try:
            self._objects()
        except RuntimeError as error:
            return str(error)
        return None

    def version(self) -> str:
        """The quantizer's version, and in parentheses those of the packages under it."""
        first, *others = (f"{name} {metadata.version(name)}" for name in self.distributions)
        return f"{first} ({', '.join(others)})" if others else first

    def cases(self, suite: str) -> Iterable[Case] | None:
        """None: it is given the suite's cases."""
        return None

    @classmethod
    def _lacking(cls) -> str | None:
        """Which package is not installed, or has a version outside ``versions``; nothing is imported."""
        missing = [name for name in (*cls.distributions, *cls.requirements) if not _installed(name)]
        if missing:
            return f"not installed: {', '.join(missing)} ({cls.install})"
        if cls.versions is not None:
            (first, below), found = cls.versions, metadata.version(cls.distributions[0])
            if not _numbers(first) <= _numbers(found) < _numbers(below):
                wanted = f"{first} or later, below {below}"
                return f"{cls.distributions[0]} {found} is installed, and this backend calls {wanted}: {cls.install}"
        return None

    @classmethod
    def _objects(cls) -> tuple[Any, ...]:
        """The objects of ``uses``, in that order.  RuntimeError, in one sentence, when one is not there."""
        if lacking := cls._lacking():
            raise RuntimeError(lacking)
        try:
            with quiet():
                return cls._import()
        except Exception as error:
            version = metadata.version(cls.distributions[0])
            raise RuntimeError(
                f"{cls.distributions[0]} {version} lacks what this backend calls "
                f"({type(error).__name__}: {error}); the version that has it: {cls.install}"
            ) from error

    @classmethod
    def _import(cls) -> tuple[Any, ...]:
        return _imported(cls.uses)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 20, 2) of "2.20.2+cu13"."""
    return tuple(int(number) for number in re.split(r"[^0-9.]", version)[0].split(".") if number)


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _imported(uses: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(_attribute(*use.split(":")) for use in uses)


def _attribute(module: str, path: str = "") -> Any:
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log lines below ERROR meanwhile: packages talk when they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---- arrays ------------------------------------------------------------------------------------------------


def matrix(x: Array) -> Array:
    """The array as (R, C) in C order, of its own dtype."""
    return np.array(x, order="C").reshape(-1, x.shape[-1])


def amax(case: Case) -> Array:
    """The amax a caller of the package would give it: the case's, else max(abs(x)) with NaN for any NaN.

    float32, 0-d, NaN 0x7FC00000: the packages' own reductions drop or change NaN as vector width has it.
    """
    if case.amax is not None:
        return np.array(case.amax, np.float32).reshape(())
    return np.array(np.abs(case.x.astype(np.float32)).max(), np.float32)


def reported_amax(case: Case, value: Any) -> Array:
    """The output ``amax``: float32, 0-d; as given by the case, else with the kernels' NaN, 0x7FFFFFFF."""
    array = np.array(value, np.float32).reshape(())
    return array if case.amax is not None else np.where(np.isnan(array), _FLOAT32_NAN, array)


# ---- torch -------------------------------------------------------------------------------------------------


def to_torch(x: Array) -> Any:
    """A torch tensor of the array's dtype that owns its memory."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_bytes(tensor: Any) -> Array:
    """The bytes of a torch tensor of one-byte elements."""
    import torch

    array: Array = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return array.copy()


def to_scale_bytes(tensor: Any) -> Array:
    """E4M3 bytes with one NaN, 0x7F: the sign of torch's depends on vector width and the block's position."""
    scales = to_bytes(tensor)
    return np.where(scales == 0xFF, np.uint8(0x7F), scales)
