"""A tensor split over the devices of a mesh: quantized where it lies, under the amax of the whole, and checked there.

Inside one's own shard_map ``across=`` of ``quantize`` and ``linear`` does the same.  Under jit alone XLA partitions the
integer path by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import nvfp4ref as nv
from nvfp4hw.jaxpath.quantize import quantize
from nvfp4hw.jaxpath.stochastic import as_key, words
from nvfp4hw.jaxpath.tensor import NVFP4Array


class Shard(NamedTuple):
    """One shard held against the oracle: its place in x, and how many codes and scale bytes differ."""

    place: tuple[slice, ...]
    codes: int
    scales: int


def quantize_sharded(
    x: jax.Array, mesh: Mesh, spec: PartitionSpec, *, axis: int = -1, rbits: Any = None, **how: Any
) -> NVFP4Array:
    """A matrix split by ``spec`` over ``mesh``, quantized shard by shard under one amax, the maximum over all.

    Args:
        x: (R, C); every shard has whole blocks.
        spec: of the two dimensions; the result is split like x, for axis 0 like its transpose.
        rbits: a JAX key, folded with the number of each shard (``shard_key``).
        how: block, rounding, rht, arithmetic as for ``quantize``.
    Raises:
        ValueError: a spec of other than two dimensions, and what quantize raises for a shard.
    """
    if x.ndim != 2 or len(spec) > 2:
        raise ValueError(f"a matrix and a spec of its two dimensions are needed; got shape {x.shape} and {spec}")
    parts = (*spec, None, None)[:2]
    axes = _axes(parts)
    placed = PartitionSpec(*(parts if axis == -1 else parts[::-1]))

    def local(x: jax.Array, key: Any) -> NVFP4Array:
        key = None if key is None else shard_key(key, jax.lax.axis_index(axes))
        return quantize(x, axis=axis, rbits=key, across=axes, **how)

    shape = jax.eval_shape(partial(quantize, axis=axis, rbits=rbits, **how), x)
    result = NVFP4Array(placed, placed, PartitionSpec(), shape.block, shape.arithmetic)  # type: ignore[arg-type]
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(*parts), PartitionSpec()), out_specs=result)(
        x, rbits
    )


def _axes(parts: tuple[Any, ...]) -> tuple[str, ...]:
    """The mesh axes of a spec, in order."""
    return tuple(name for part in parts if part is not None for name in ((part,) if isinstance(part, str) else part))


def shard_key(key: Any, number: Any) -> Any:
    """The key of a shard, numbered along the mesh axes of the spec in their order."""
    return jax.random.fold_in(as_key(key), number)


def check_sharded(q: NVFP4Array, x: jax.Array, *, axis: int = -1, rbits: Any = None, rht: Any = None) -> list[Shard]:
    """The shards of x that this process holds, each against the oracle under the whole tensor's amax.

    Args:
        q: what ``quantize_sharded`` gave for x, rbits and rht.
    Returns:
        a Shard for every distinct one.
    Raises:
        ValueError: an amax that is not that of x (of its transform), over all shards held here.
    """
    held = {str(shard.index): shard for shard in x.addressable_shards}
    packed, scales = (
        {shard.device: np.asarray(shard.data) for shard in a.addressable_shards} for a in (q.packed, q.scales)
    )
    how = {"axis": axis, "block": q.block, "rht": rht, "arithmetic": q.arithmetic}
    if x.is_fully_addressable:
        expected = max(nv.quantize(np.asarray(shard.data), **how).amax for shard in held.values())
        if not np.array_equal(np.asarray(q.amax).view(np.uint32), np.asarray(expected).view(np.uint32)):
            raise ValueError(f"the amax of the whole tensor is {expected!r}; the result has {np.asarray(q.amax)!r}")
    found = []
    for number, shard in enumerate(sorted(held.values(), key=lambda shard: _starts(shard.index))):
        part = np.asarray(shard.data)
        options = dict(how)
        if rbits is not None:
            shape = part.shape if axis == -1 else part.shape[::-1]
            options |= {"rounding": "stochastic", "rbits": np.asarray(words(shard_key(rbits, number), shape))}
        oracle = nv.quantize(part, amax=np.asarray(q.amax), **options)
        codes = nv.e2m1.unpack(packed[shard.device]) != oracle.codes
        found.append(Shard(shard.index, int(codes.sum()), int((scales[shard.device] != oracle.scales).sum())))
    return found


def _starts(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)
