"""The quantizers that the suite can run, found by name and imported only when asked for.

Built-in backends are listed by module; third parties add theirs through the entry-point group
``nvfp4.backends`` (a class or an instance that follows :class:`~nvfp4hw.backends.base.Backend`).  A backend
that cannot be imported stays in the list as one that is not available, with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nvfp4hw.backends.base import Backend, Case, Outputs

__all__ = ["Backend", "Case", "ENTRY_POINT_GROUP", "Outputs", "Unavailable", "load", "names"]

ENTRY_POINT_GROUP = "nvfp4.backends"

#: Built-in backends: name -> module, or module:class.  A module has ``BACKEND``, the class (or an instance) of its
#: first backend.
_BUILT_IN = {
    "te-vectors": "nvfp4hw.backends.te_vectors",
    "cuda-header": "nvfp4hw.backends.cuda_header",
    "te-reference": "nvfp4hw.backends.te_reference",
    "te-jax": "nvfp4hw.backends.te_jax",
    "torchao": "nvfp4hw.backends.torchao",
    "modelopt": "nvfp4hw.backends.modelopt",
    "compressed-tensors": "nvfp4hw.backends.compressed_tensors",
    "jax-nn": "nvfp4hw.backends.jax_nn",
    "jaxpath": "nvfp4hw.backends.jaxpath",
    "qwix": "nvfp4hw.backends.qwix",
    "qwantize": "nvfp4hw.backends.qwantize",
    "te-torch": "nvfp4hw.backends.te_torch",
    "te-torch-kernels": "nvfp4hw.backends.te_kernels",
    "te-jax-gpu": "nvfp4hw.backends.te_jax:TransformerEngineJaxGpu",
    "te-jax-cuda": "nvfp4hw.backends.te_jax:TransformerEngineJaxCuda",
    "torchao-gpu": "nvfp4hw.backends.torchao:TorchaoGpu",
    "torchao-mslk": "nvfp4hw.backends.torchao:TorchaoMslk",
    "torchao-training": "nvfp4hw.backends.torchao:TorchaoTraining",
    "flashinfer": "nvfp4hw.backends.flashinfer",
    "jax-nn-gpu": "nvfp4hw.backends.jax_nn:JaxNNGpu",
    "cublaslt": "nvfp4hw.backends.cublaslt",
}


@dataclass
class Unavailable:
    """A backend whose module could not be imported: it is reported as not run."""

    name: str
    reason: str
    preset: str = ""
    features: frozenset[str] = frozenset()

    def availability(self) -> str:
        return self.reason

    def version(self) -> str:
        return ""

    def cases(self, suite: str) -> Iterable[Case]:
        return ()

    def quantize(self, case: Case) -> Outputs:
        raise RuntimeError(f"backend {self.name} is not available: {self.reason}")


def names() -> list[str]:
    """Names of every backend, built-in first, then those of other packages in alphabetical order."""
    return [*_BUILT_IN, *sorted(set(_third_party()) - set(_BUILT_IN))]


def built_in() -> list[str]:
    """Names of the backends of this package."""
    return list(_BUILT_IN)


def load(name: str) -> Backend:
    """The backend of that name; :class:`Unavailable` when its module fails to import.

    Raises ValueError for a name that nobody registered.
    """
    third_party = _third_party()
    if name not in _BUILT_IN and name not in third_party:
        raise ValueError(f"there is no backend {name!r}; the backends are {', '.join(names())}")
    try:
        built_in = name in _BUILT_IN
        found = _built_in(name) if built_in else third_party[name].load()
        backend = found() if isinstance(found, type) else found
    except Exception as error:  # noqa: BLE001 - whatever another package's import raises must not end the run
        return Unavailable(name, f"its module cannot be imported: {type(error).__name__}: {error}")
    if not isinstance(backend, Backend):
        return Unavailable(name, f"{found!r} is no Backend: see nvfp4hw.backends.base for the members it needs")
    return backend


def _built_in(name: str) -> Any:
    module, _, member = _BUILT_IN[name].partition(":")
    return getattr(importlib.import_module(module), member or "BACKEND")


def _third_party() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
