"""A tensor split over the devices of a mesh: quantized where it lies, under the amax of the whole, and checked there.

    python -m nvfp4hw.jaxpath.shard [--size N]

Inside one's own shard_map ``across=`` of ``quantize`` and ``linear`` does the same.  Under jit alone XLA partitions the
integer path by itself.  The command confirms all three on the devices that there are, shard by shard.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nvfp4ref as nv
from nvfp4hw.jaxpath import check
from nvfp4hw.jaxpath.linear import Call, linear, observed
from nvfp4hw.jaxpath.quantize import quantize
from nvfp4hw.jaxpath.stochastic import as_key, is_key, words
from nvfp4hw.jaxpath.tensor import NVFP4Array
from nvfp4ref.blocks import tensor_amax
from nvfp4ref.recipe import GEMMS, recipe

Array = np.ndarray[Any, Any]
Region = tuple[tuple[int, int], tuple[int, int]]  # rows and columns of x, each from and to


class Shard(NamedTuple):
    """What one device holds, against the oracle: its region of x, and how many codes, scale bytes and amaxes differ."""

    device: str
    region: Region
    codes: int
    scales: int
    amax: int

    @property
    def different(self) -> int:
        return self.codes + self.scales + self.amax


# -- to quantize -----------------------------------------------------------------------------------------------


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
        TypeError: random numbers other than a key.
        ValueError: a spec of other than two dimensions or of axes that the mesh lacks, a shard without whole blocks,
            an amax of rows, and what quantize raises.
    """
    if x.ndim != 2 or len(spec) > 2:
        raise ValueError(f"a matrix and a spec of its two dimensions are needed; got shape {x.shape} and {spec}")
    if rbits is not None and not is_key(rbits):
        raise TypeError(f"rbits of a sharded tensor are one JAX key, which every shard folds; got {_kind(rbits)}")
    if how.get("amax") is not None:
        raise ValueError("amax is the whole tensor's, over all its shards; under a given one quantize each by itself")
    parts = (*spec, None, None)[:2]
    axes = tuple(name for part in parts for name in _names(part))
    if missing := [name for name in axes if name not in mesh.shape]:
        raise ValueError(f"{spec} names {missing[0]!r}; the axes of the mesh are {dict(mesh.shape)}")
    whole = jax.eval_shape(partial(quantize, axis=axis, rbits=rbits, **how), jax.ShapeDtypeStruct(x.shape, x.dtype))
    if whole.arithmetic.row_scaled:
        raise ValueError("row-scaled tensors have no amax of the whole: jit quantize, and XLA partitions it")
    _require_blocks(x.shape, [math.prod(mesh.shape[name] for name in _names(part)) for part in parts], axis, whole)

    def local(x: jax.Array, key: Any) -> NVFP4Array:
        key = None if key is None else shard_key(key, jax.lax.axis_index(axes))
        return quantize(x, axis=axis, rbits=key, across=axes, **how)

    placed = PartitionSpec(*(parts if axis == -1 else parts[::-1]))
    result = NVFP4Array(placed, placed, PartitionSpec(), whole.block, whole.arithmetic)  # type: ignore[arg-type]
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(*parts), PartitionSpec()), out_specs=result)(
        x, rbits
    )


def shard_key(key: Any, number: Any) -> Any:
    """The key of a shard, numbered along the mesh axes of the spec in their order."""
    return jax.random.fold_in(as_key(key), number)


def _names(part: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension of a spec."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _kind(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if hasattr(value, "dtype") else type(value).__name__


def _require_blocks(shape: tuple[int, ...], parts: list[int], axis: int, q: NVFP4Array) -> None:
    """ValueError unless each of parts[0] x parts[1] shards has the same shape and whole blocks."""
    units = [16 if q.block == (16, 16) or axis == d else 1 for d in (0, -1)]
    for length, count, unit, name in zip(shape, parts, units, ("rows", "columns"), strict=True):
        if length % (count * unit):
            least = -(-length // (count * unit)) * count * unit
            each = "the same length" if unit == 1 else f"{unit} {name} or a multiple of it"
            raise ValueError(
                f"{length} {name} of {shape} do not split into {count} shards of {each}, as {q.block[0]}x{q.block[1]} "
                f"blocks along axis {axis} need: pad with zeros to {least} {name}, or split over fewer devices"
            )


# -- to check --------------------------------------------------------------------------------------------------


def check_sharded(
    q: NVFP4Array, x: Any, *, axis: int = -1, rbits: Any = None, rht: nv.RHT | None = None, threads: int = 1
) -> list[Shard]:
    """What each device of this process holds of q, against the oracle under the whole tensor's amax.

    Args:
        q: what ``quantize_sharded`` gave for x, axis, rbits and rht.
        x: the whole tensor; over several processes the array that was quantized, split as q is.
        threads: of the oracle.
    Raises:
        ValueError: x of another shape, or split otherwise over several processes.
    """
    shape = q.shape if axis == -1 else q.shape[::-1]
    if tuple(x.shape) != shape:
        raise ValueError(f"the result is that of a tensor {shape}, with axis {axis}; x has shape {tuple(x.shape)}")
    numbers = {region: n for n, region in enumerate(sorted(set(_regions(q.packed, shape, axis).values())))}
    parts = _parts(x, set(_regions(q.packed, shape, axis, here=True).values()))
    amax = _whole_amax(parts.values(), axis, q.block, rht)
    how: dict[str, Any] = {"axis": axis, "block": q.block, "rht": rht, "arithmetic": q.arithmetic, "amax": amax}
    if rbits is not None:
        how["rounding"] = "stochastic"

    def oracle(region: Region) -> nv.NVFP4Tensor:
        part = parts[region]
        random = None if rbits is None else _words(shard_key(rbits, numbers[region]), part, axis)
        return nv.quantize(part, rbits=random, threads=max(1, threads // len(parts)), **how)

    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        expected = dict(zip(parts, pool.map(oracle, parts), strict=True))
    return list(_compared(q, shape, axis, expected, amax))


def _regions(packed: jax.Array, shape: tuple[int, ...], axis: int, here: bool = False) -> dict[Any, Region]:
    """device -> the region of x, which has that shape, whose codes it holds; ``here``: of this process only."""
    sharding, found = packed.sharding, {}
    for device, index in sharding.devices_indices_map(packed.shape).items():
        if here and device not in sharding.addressable_devices:
            continue
        (top, bottom, _), (left, right, _) = (s.indices(n) for s, n in zip(index, packed.shape, strict=True))
        rows, columns = (top, bottom), (2 * left, 2 * right)
        found[device] = (rows, columns) if axis == -1 else (columns, rows)
    return found


def _parts(x: Any, regions: set[Region]) -> dict[Region, Array]:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        whole = np.asarray(x)
        return {region: whole[slice(*region[0]), slice(*region[1])] for region in sorted(regions)}
    held = {}
    for shard in x.addressable_shards:
        rows, columns = (s.indices(n)[:2] for s, n in zip(shard.index, x.shape, strict=True))
        held[rows, columns] = shard.data
    if missing := regions - set(held):
        raise ValueError(f"x is split otherwise than the result: rows and columns {min(missing)} of it are not here")
    return {region: np.asarray(held[region]) for region in sorted(regions)}


_compiled_words = jax.jit(words, static_argnums=1)


def _words(key: Any, x: Array, axis: int) -> Array:
    """The words of a key for the result of x."""
    return np.asarray(_compiled_words(key, x.shape if axis == -1 else x.shape[::-1]))


def _whole_amax(tensors: Iterable[Array], axis: int, block: tuple[int, int], rht: nv.RHT | None) -> Array:
    """The oracle's amax of all of them, float32; over several processes by JAX's own gathering."""
    if rht is None:
        amax = np.asarray(max(tensor_amax(x) for x in tensors))
    else:
        amax = np.asarray(max(nv.quantize(x, axis=axis, block=block, rht=rht).amax for x in tensors))
    if jax.process_count() == 1:
        return amax
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(amax.view(np.uint32))).max().view(np.float32)


def _compared(
    q: NVFP4Array, shape: tuple[int, ...], axis: int, oracle: dict[Region, nv.NVFP4Tensor], amax: Array
) -> Iterator[Shard]:
    """Every device of this process; ``oracle`` has the results for the regions."""
    held = [{shard.device: np.asarray(shard.data) for shard in a.addressable_shards} for a in (q.packed, q.scales)]
    amaxes = {shard.device: np.asarray(shard.data) for shard in q.amax.addressable_shards}
    for device, region in _regions(q.packed, shape, axis, here=True).items():
        packed, scales = (of_device[device] for of_device in held)
        expected = oracle[region]
        yield Shard(
            str(device),
            region,
            int((nv.e2m1.unpack(packed) != expected.codes).sum()),
            int((scales != expected.scales).sum()),
            int(amaxes[device].view(np.uint32) != amax.view(np.uint32)),
        )


# -- the confirmation ------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One tensor on one mesh: how many devices held parts of it, elements compared, what differed or went wrong."""

    what: str
    spec: str
    devices: int
    elements: int
    different: int
    error: str = ""


CALLS: dict[str, dict[str, Any]] = {
    "rowwise": {},
    "columnwise": {"axis": 0},
    "16x16": {"block": (16, 16)},
    "columnwise, Hadamard": {"axis": 0, "rht": nv.RHT()},
    "stochastic": {"rounding": "stochastic"},
    "columnwise, Hadamard, stochastic": {"axis": 0, "rht": nv.RHT(), "rounding": "stochastic"},
}
SPECS = tuple(PartitionSpec(*parts) for parts in ((None, "t"), ("d", None), ("d", "t"), (("d", "t"), None)))


def layouts(devices: list[Any]) -> Iterator[tuple[Mesh, PartitionSpec]]:
    """Meshes of one and of two rows of the devices, axes d and t, with the specs that split a matrix differently."""
    count, seen = len(devices), set()
    for rows in (1, 2) if count % 2 == 0 else (1,):
        mesh = Mesh(np.array(devices).reshape(rows, count // rows), ("d", "t"))
        for spec in SPECS:
            split = NamedSharding(mesh, spec).devices_indices_map((16 * count, 16 * count))
            order = tuple(str(split[device]) for device in devices)
            if order not in seen and (len(set(order)) > 1 or count == 1):
                seen.add(order)
                yield mesh, spec


def tensors(size: int, parts: int) -> dict[str, Array]:
    """bfloat16 (size, size): normal with its largest element in the last shard and a NaN in the first; then small ones
    of zeros, and of subnormal numbers, of which a device may flush none."""
    random, small = np.random.default_rng(5), 16 * parts
    normal = random.standard_normal((size, size), np.float32)
    normal[-1, -1], normal[3, 5] = -77, np.nan
    tiny = random.standard_normal((small, small), np.float32) * np.float32(2**-130)
    named = {"normal": normal, "zeros": np.zeros((small, small), np.float32), "subnormal": tiny}
    return {name: x.astype(ml_dtypes.bfloat16) for name, x in named.items()}


def confirm(devices: list[Any], size: int, threads: int = 1) -> Iterator[Line]:
    """Every call on every layout, then small tensors, what XLA partitions by itself, and a linear layer."""
    key, given = jax.random.key(7), tensors(size, len(devices))
    for mesh, spec in layouts(devices):
        for name, how in CALLS.items():
            yield _tried(_sharded, name, given["normal"], mesh, spec, key, how, threads)
    for name in ("zeros", "subnormal"):
        yield _tried(_sharded, f"rowwise, {name}", given[name], mesh, spec, key, {}, threads)
    for name, how in CALLS.items():
        yield _tried(_partitioned, f"jit alone: {name}", given["normal"], mesh, spec, key, how, threads)
    try:
        yield from linear_operands(Mesh(np.array(devices), ("d",)), key)
    except Exception as error:  # noqa: BLE001 - as below
        yield Line("linear", f"({len(devices)},) by tokens", 0, 0, 0, _message(error))


def _tried(compare: Callable[..., Line], name: str, x: Array, mesh: Mesh, spec: PartitionSpec, *given: Any) -> Line:
    try:
        return compare(name, x, mesh, spec, *given)
    except Exception as error:  # noqa: BLE001 - what a device cannot do is a line, not the end of the others
        return Line(name, _said(mesh, spec), 0, 0, 0, _message(error))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _placed(x: Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def _sharded(name: str, x: Array, mesh: Mesh, spec: PartitionSpec, key: Any, how: dict[str, Any], threads: int) -> Line:
    rbits = key if "rounding" in how else None
    q = jax.jit(lambda x, rbits: quantize_sharded(x, mesh, spec, rbits=rbits, **how))(_placed(x, mesh, spec), rbits)
    shards = check_sharded(q, x, axis=how.get("axis", -1), rbits=rbits, rht=how.get("rht"), threads=threads)
    return Line(name, _said(mesh, spec), len(shards), x.size, sum(shard.different for shard in shards))


def _said(mesh: Mesh, spec: PartitionSpec) -> str:
    parts = (*spec, None)[:2]
    return f"{tuple(mesh.devices.shape)} by ({', '.join('+'.join(_names(part)) or '-' for part in parts)})"


def _partitioned(
    name: str, x: Array, mesh: Mesh, spec: PartitionSpec, key: Any, how: dict[str, Any], threads: int
) -> Line:
    """Words of a key are those of the whole tensor here, wherever it lies."""
    rbits = random = None
    if "rounding" in how:
        rbits, random = key, _words(key, x, how.get("axis", -1))
    q = jax.jit(lambda x, rbits: quantize(x, rbits=rbits, **how))(_placed(x, mesh, spec), rbits)
    expected = nv.quantize(x, rbits=random, threads=threads, **how)
    return Line(name, _said(mesh, spec), mesh.size, x.size, _different(q.to_numpy(), expected))


def _different(found: nv.NVFP4Tensor, expected: nv.NVFP4Tensor) -> int:
    amax = found.amax.view(np.uint32) != expected.amax.view(np.uint32)
    return int((found.codes != expected.codes).sum() + (found.scales != expected.scales).sum() + amax.sum())


def linear_operands(mesh: Mesh, key: Any) -> Iterator[Line]:
    """The operands of a differentiated ``linear`` whose tokens are split over the one axis of a mesh, with a key for
    each device."""
    (axis,), random = mesh.axis_names, np.random.default_rng(6)
    shapes = {"x": (32 * mesh.size, 128), "w": (64, 128), "dy": (32 * mesh.size, 64)}
    given = {name: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    calls: list[Call] = []

    def step(x: jax.Array, w: jax.Array, dy: jax.Array, key: Any) -> Any:
        own = shard_key(key, jax.lax.axis_index(axis))
        y, gradients = jax.vjp(lambda x, w: linear(x, w, own, across=(axis,)), x, w)
        return y, *gradients(dy)

    tokens, whole = PartitionSpec(axis), PartitionSpec()
    split = jax.shard_map(step, mesh=mesh, in_specs=(tokens, whole, tokens, whole), out_specs=(tokens, tokens, whole))
    with observed(calls.append):
        jax.block_until_ready(jax.jit(split)(*given.values(), key))
        jax.effects_barrier()
    for gemm in GEMMS:
        for place, operand in enumerate(recipe("te").operands(gemm)):
            parts = [np.asarray(getattr(call, operand.tensor)) for call in calls]
            amax = _whole_amax(parts, operand.axis, operand.block, operand.rht)
            different = 0
            for call, part in zip(calls, parts, strict=True):
                expected = nv.quantize(part, amax=amax, rbits=check.words(call, operand), **operand.options())
                different += _different(call.operands[gemm][place], expected)
            tensor = given[operand.tensor]  # of which each device has a part, or of the weight all
            held = [tensor] * mesh.size if operand.tensor == "w" else np.split(tensor, mesh.size)
            different += sorted(part.tobytes() for part in parts) != sorted(part.tobytes() for part in held)
            elements = sum(part.size for part in parts)
            yield Line(f"linear: {gemm} {operand.tensor}", f"({mesh.size},) by tokens", len(calls), elements, different)


def main() -> int:
    """Print a table; 1 when anything differs."""
    parser = argparse.ArgumentParser(description="Tensors split over all devices, against the oracle.")
    parser.add_argument("--size", type=int, help="rows and columns of the tensor (16 for each device or a multiple)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the oracle")
    options, devices = parser.parse_args(), jax.devices()
    unit = 16 * len(devices)
    size = unit * max(1, 1024 // unit) if options.size is None else options.size
    if size < unit or size % unit or options.threads < 1:
        parser.error(f"size is a positive multiple of {unit} on {len(devices)} devices, threads at least 1")
    start, lines = time.monotonic(), []
    print(f"jax {jax.__version__} on {len(devices)} x {devices[0].device_kind}, {size}x{size} bfloat16")
    print(f"{'':44}{'mesh and spec':24}{'devices':>8}{'elements':>14}{'differ':>8}")
    for line in confirm(devices, size, options.threads):
        lines.append(line)
        counts = line.error or f"{line.devices:8}{line.elements:14,}{line.different:8}"
        print(f"{line.what:44}{line.spec:24}{counts}", flush=True)
    different, failed = sum(line.different for line in lines), sum(bool(line.error) for line in lines)
    print(f"{different} differ, {failed} failed; {time.monotonic() - start:.0f} s")
    return int(different + failed > 0)


if __name__ == "__main__":
    sys.exit(main())
