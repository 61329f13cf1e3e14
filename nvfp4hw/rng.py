"""From the random generator of a real run to the words that its kernels drew.

Transformer Engine's PyTorch side draws from PyTorch's CUDA generator: seed and offset of the generator are seed
and offset of the launch, and every quantization moves the offset on by 1024.  Its JAX side makes four uint32 from a
key of the stream ``sr_rng``; they are seed and offset for the CUDA kernels, and a key again for the pure-JAX
quantizer.  docs/replay.md shows both from beginning to end.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

import nvfp4ref as nv
from nvfp4ref.container import counted
from nvfp4ref.streams import dispatch

Array = np.ndarray[Any, Any]
OFFSET_STEP = 1024  # what one quantization takes of PyTorch's generator
_INT32_MAX = 2**31 - 1


class Launch(NamedTuple):
    """The words of one quantization: ``rbits`` for its two outputs, and the generator's offset afterwards."""

    row: nv.Philox | None
    column: nv.Philox | None
    next_offset: int


# ---- PyTorch -----------------------------------------------------------------------------------------------


def torch_state(generator: Any) -> tuple[int, int]:
    """Seed and offset of a PyTorch CUDA generator, taken just before the quantization.

    Args:
        generator: ``torch.cuda.default_generators[device]`` or another CUDA ``torch.Generator``; or the 16
            bytes of ``torch.cuda.get_rng_state()``, as a tensor, an array or bytes.
    Raises:
        ValueError: the state of another kind of generator, which has another size.
    """
    if hasattr(generator, "get_offset"):
        if getattr(getattr(generator, "device", None), "type", "cuda") != "cuda":
            raise ValueError(
                "the kernels draw from a CUDA generator, torch.cuda.default_generators[device]; got one on "
                f"{generator.device}"
            )
        return int(generator.initial_seed()) % 2**64, int(generator.get_offset())
    state = np.frombuffer(generator, np.uint8) if isinstance(generator, bytes) else np.asarray(generator)
    if state.dtype != np.uint8 or state.size != 16:
        raise ValueError(
            "the state of a CUDA generator is 16 bytes, seed and offset (torch.cuda.get_rng_state()); got "
            f"{counted(state.size, 'item')} of {state.dtype}"
        )
    seed, offset = np.ascontiguousarray(state).view("<u8").tolist()
    return seed, offset


def pytorch_launch(
    state: tuple[int, int],
    shape: tuple[int, int],
    *,
    dtype: str = "bfloat16",
    block: tuple[int, int] = (1, 16),
    directions: str = "both",
    rht: bool = False,
    fused: bool = True,
) -> Launch:
    """The words of one call of ``NVFP4Quantizer`` from the generator's (seed, offset) before it.

    Args:
        shape: of x as a matrix; dtype: its name; block: (16, 16) with 2-D quantization.
        directions: "row", "col" or "both": the outputs that the call makes.
        rht: the columnwise output goes through the Hadamard transform.
        fused: the device has the fused kernels (compute capability 10.0 to 11.0).
    Returns:
        Launch; a direction that is not made is None.  An unfused transform draws a state of its own for the
        columnwise output, after the rowwise one: where SR, the transform and a columnwise output come
        together, the call takes 2048.
    Raises:
        ValueError: unknown directions.
    """
    _check_directions(directions)
    seed, offset = state
    both = directions == "both"
    how: dict[str, Any] = {"dtype": dtype, "block": block}
    if rht and (not fused or dispatch(shape, 0, rht=True, **how) == "unfused-rht"):
        row = nv.Philox(seed, offset, dispatch(shape, -1, **how))
        column = nv.Philox(seed, offset + OFFSET_STEP, "unfused-rht")
        after = offset + OFFSET_STEP * (1 if directions == "row" else 2)
    else:
        named = {axis: dispatch(shape, axis, both=both, rht=rht, **how) for axis in (-1, 0)}
        row, column = (nv.Philox(seed, offset, named[axis], both) for axis in (-1, 0))
        after = offset + OFFSET_STEP
    return Launch(row if directions != "col" else None, column if directions != "row" else None, after)


def _check_directions(directions: str) -> None:
    if directions not in ("row", "col", "both"):
        raise ValueError(f"directions is 'row', 'col' or 'both'; got {directions!r}")


# ---- JAX ---------------------------------------------------------------------------------------------------


def jax_state(key: Any, quantizer_name: str = "grad", devices: int = 1) -> Array:
    """The four uint32 a device that Transformer Engine's JAX side makes of a key: (devices, 4).

    Args:
        key: what ``module.make_rng("sr_rng")`` gave the module.
        quantizer_name: "grad" in every module of Transformer Engine; only gradients round stochastically.
        devices: of the mesh.
    """
    import jax

    digest = hashlib.sha256(quantizer_name.encode()).hexdigest()
    key = jax.random.fold_in(key, int(digest, 16) % _INT32_MAX)
    state = jax.random.randint(key, (devices, 4), 0, _INT32_MAX, dtype=jax.numpy.int32)
    return np.asarray(state).view(np.uint32)


def jax_seed_offset(state: Any, device: int = 0) -> tuple[int, int]:
    """Seed and offset that a device's kernels are given: (u0 | u1·2^32, u2 | u3·2^32).

    Raises ValueError unless the state is uint32, (4,) or (devices, 4).
    """
    words = np.asarray(state)
    if words.dtype != np.uint32 or words.ndim not in (1, 2) or words.shape[-1] != 4:
        raise ValueError(
            f"the state is four uint32 a device, shape (4,) or (devices, 4); got {words.dtype} {words.shape}"
        )
    u0, u1, u2, u3 = (int(word) for word in words.reshape(-1, 4)[device])
    return u0 | u1 << 32, u2 | u3 << 32


def jax_launch(state: tuple[int, int], shape: tuple[int, int], *, directions: str = "both", rht: bool = True) -> Launch:
    """The words of one quantization by Transformer Engine's JAX side, bfloat16, 1x16 blocks.

    With the transform the rowwise and the columnwise kernel are launched one after the other with the same
    state, and so share words (rule STREAM-FUSED-RHT-COLUMNWISE).  ``next_offset`` is the state's: a state is used
    for one quantizer and one step.
    """
    _check_directions(directions)
    seed, offset = state
    both = directions == "both" and not rht
    column_kernel = "fused-rht-columnwise" if rht else "auto"
    row = nv.Philox(seed, offset, "auto", both) if directions != "col" else None
    column = nv.Philox(seed, offset, column_kernel, both) if directions != "row" else None
    return Launch(row, column, offset)


def jax_uniforms(state: Any, shape: tuple[int, ...]) -> Array:
    """The float32 uniforms of the pure-JAX quantizer (rule SR-JAX): the state is a key and two numbers folded in.

    They depend on how many elements there are and not on the direction; only the first device's state is used.
    """
    import jax

    jax_seed_offset(state)  # its check
    first = np.asarray(state).reshape(-1, 4)[0]
    key = jax.random.wrap_key_data(jax.numpy.asarray(first[:2]))
    for word in first[2:]:
        key = jax.random.fold_in(key, word)
    return np.asarray(jax.random.uniform(key, shape, jax.numpy.float32))
