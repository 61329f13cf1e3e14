"""What the backends on a GPU share: is there one, of which generation, and what it said when it refused.

The frameworks are imported here only to ask, and not before the packages are known to be installed.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from nvfp4hw.backends import _package

Array = np.ndarray[Any, Any]

DEVICE = "cuda"  # where torch's tensors go
#: Generations with the hardware's stochastic conversion; Transformer Engine rounds by software on the others.
STOCHASTIC_CONVERSION = ((10, 0), (10, 3), (10, 7))


def torch_capability() -> tuple[int, int]:
    """Compute capability of the device that torch uses.  RuntimeError, in one sentence, when there is none."""
    import torch

    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA: install a CUDA build of it")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no GPU: run this where nvidia-smi shows one")
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def jax_gpu() -> Any:
    """The first GPU that JAX uses.  RuntimeError, in one sentence, when there is none."""
    import jax

    try:
        found = [device for device in jax.devices("gpu") if "NVIDIA" in str(device.device_kind)]
    except RuntimeError:
        found = []
    if not found:
        raise RuntimeError(
            f"jax {jax.__version__} finds no NVIDIA GPU: pip install 'jax[cuda13]', and run this where "
            "nvidia-smi shows one"
        )
    return found[0]


def reason(question: Callable[[], Any]) -> str | None:
    """Why a question about the GPU has no answer, or None."""
    try:
        question()
    except RuntimeError as error:
        return str(error)
    return None


def said(capability: tuple[int, int]) -> str:
    """(9, 0) as "sm_90"."""
    return f"sm_{capability[0]}{capability[1]}"


class TorchBackend(_package.PackageBackend):
    """A backend whose package runs on torch's GPU; ``least`` is the first compute capability with its kernels."""

    least: ClassVar[tuple[int, int]] = (10, 0)
    device = "cuda"

    def availability(self) -> str | None:
        """None, or what is missing: the package, the GPU, or the call, and what would change that."""
        missing = self._lacking() or reason(torch_capability)
        if missing is not None:
            return missing
        if (found := torch_capability()) < self.least:
            return f"its kernels need {said(self.least)} or newer, and this GPU is {said(found)}"
        return super().availability()

    def version(self) -> str:
        """Versions of the packages, and the device."""
        import torch

        return f"{super().version()} on {torch.cuda.get_device_name()} ({said(torch_capability())})"


def synchronize() -> None:
    """Wait for torch's GPU; an error of a kernel is raised here."""
    import torch

    torch.cuda.synchronize()


def generator() -> Any:
    """torch's generator on the GPU."""
    import torch

    return torch.cuda.default_generators[torch.cuda.current_device()]


def stream() -> int:
    """The address of torch's current stream."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def to_gpu(x: Array) -> Any:
    """A torch tensor of the array's dtype on the GPU."""
    return _package.to_torch(x).to(DEVICE)


def filled(shape: tuple[int, ...], dtype: str, byte: int = 0) -> Any:
    """A torch tensor on the GPU with every byte set."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE)
    tensor.view(torch.uint8).fill_(byte)
    return tensor


def to_numpy(tensor: Any) -> Array:
    """A torch tensor as the array that ``to_torch`` makes it of; bfloat16 as ml_dtypes' type."""
    import ml_dtypes
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy())


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables that a package reads at every call, set meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def printed() -> Iterator[list[str]]:
    """What the process, and so a kernel, prints on standard output meanwhile: different messages, in order.

    A kernel compiled for a generation that lacks an instruction prints and goes on.  Its lines are in the list
    once the block is left, the place in the source and the thread cut off.
    """
    found: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield found
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            lines = (line.decode(errors="replace").strip() for line in file)
            found += list(dict.fromkeys(re.sub(r"^.*\(.*thread.*\): ", "", line)[:200] for line in lines if line))[:3]
