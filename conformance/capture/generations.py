"""Generations of the cases: which of them, and which features of a backend, a recording of its time cannot have known.

A bundle says of which generation the cases were when it was recorded.  Cases that came later are newer than the
recording and no fault of it; all others that its backends serve must be there, whatever the bundle says it was asked.

Whoever adds cases, or a feature to a backend, appends a generation; ``python -m conformance.capture.generations``
prints what it is made of.  Names are never listed twice: what no generation calls new was there in the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from conformance import cases as suite_cases
from nvfp4hw import backends

SUITES = ("quick", "full")  # those that are captured


@dataclass(frozen=True)
class Generation:
    """What there was to ask at one time.

    Attributes:
        hashes: scope -> hash of its names; the scopes are a suite, a backend's own cases in a suite, and a backend's
            features.
        new: scope -> patterns of the names that the generation before did not have.
    """

    hashes: Mapping[str, str]
    new: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def own_cases(backend: str, suite: str) -> str:
    """The scope of a backend's own cases."""
    return f"{backend} {suite}"


def features(backend: str) -> str:
    """The scope of a backend's features."""
    return f"{backend} features"


GENERATIONS: tuple[Generation, ...] = (
    Generation(
        {
            "quick": "a74448b380dfc6cd",
            "full": "2b66c5290c124ac2",
            "te-vectors features": "d49b0baa9b3ccf73",
            "te-vectors quick": "fb849952b235a66e",
            "te-vectors full": "5a13569aa2e8f486",
            "cuda-header features": "8403c3a9d0867396",
            "te-reference features": "0cca401b1ee68a0f",
            "te-jax features": "ddbf2c9e8344f964",
            "torchao features": "435287d046155d57",
            "modelopt features": "f42e2469b948f258",
            "compressed-tensors features": "415936519ce7a6c9",
            "jax-nn features": "f42e2469b948f258",
            "jaxpath features": "aa42eb1d09e40002",
            "qwix features": "ed5660533d5d2039",
            "qwantize features": "146cccf046da7233",
            "te-torch-kernels features": "445b1d0180585330",
            "te-torch-kernels quick": "74decd82a7eb3442",
            "te-torch-kernels full": "74decd82a7eb3442",
            "te-jax-gpu features": "ddbf2c9e8344f964",
            "te-jax-cuda features": "e3a7e133be92bfe3",
            "torchao-gpu features": "435287d046155d57",
            "torchao-mslk features": "4455436eb9b84085",
            "torchao-training features": "239f5e82113a0e4e",
            "flashinfer features": "7b3d280305cf3861",
            "jax-nn-gpu features": "f42e2469b948f258",
            "cublaslt features": "c892e555619d7d36",
            "cublaslt quick": "77da0377fd7684b4",
            "cublaslt full": "77da0377fd7684b4",
        }
    ),
)


def latest() -> int:
    """The generation of the cases as they are; the first is 1."""
    return len(GENERATIONS)


def since(scope: str, name: str) -> int:
    """The generation in which a case or feature appeared."""
    for number, one in reversed(list(enumerate(GENERATIONS, 1))):
        if any(fnmatchcase(name, pattern) for pattern in one.new.get(scope, ())):
            return number
    return 1


def present() -> dict[str, list[str]]:
    """The names that there are, by scope; of this project's backends what hangs on no device."""
    found = {suite: [case.id for case in suite_cases.cases(suite)] for suite in SUITES}
    for name in backends.built_in():
        backend = backends.load(name)
        constant = getattr(type(backend), "features", None)
        if isinstance(backend, backends.Unavailable):
            continue
        if isinstance(constant, frozenset):
            found[features(name)] = sorted(constant)
        for suite in SUITES:
            own = backend.cases(suite)
            if own is not None:
                found[own_cases(name, suite)] = [case.id for case in own]
    return found


def hashed(names: Iterable[str]) -> str:
    """A hash of names, in whatever order they are."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def hashes_of(generation: int, names: Mapping[str, list[str]]) -> dict[str, str]:
    """The hashes of a generation, made of the present names without those that are newer."""
    scopes = GENERATIONS[generation - 1].hashes if generation < latest() else names
    return {
        scope: hashed(name for name in names[scope] if since(scope, name) <= generation)
        for scope in scopes
        if scope in names
    }


if __name__ == "__main__":
    for scope, digest in hashes_of(latest(), present()).items():
        print(f'            "{scope}": "{digest}",')
