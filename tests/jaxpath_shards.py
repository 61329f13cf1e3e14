"""Tests of tensors split over eight devices; test_jaxpath_shard.py runs them where JAX starts with as many."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nvfp4ref as nv
from nvfp4hw import jaxpath
from nvfp4hw.jaxpath import shard, stochastic
from nvfp4hw.jaxpath.shard import check_sharded, quantize_sharded

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
DEVICES = np.array(jax.devices())
LINE, GRID = Mesh(DEVICES, ("t",)), Mesh(DEVICES.reshape(2, 4), ("d", "t"))
KEY = jax.random.key(3)
MESHES = {
    "t": (LINE, P(None, "t")),
    "rows": (LINE, P("t")),
    "-t": (GRID, P(None, "t")),
    "d-": (GRID, P("d", None)),
    "dt": (GRID, P("d", "t")),
    "d+t": (GRID, P(("d", "t"), None)),
}
PAIRS = (
    ("t", ("rowwise", "columnwise, Hadamard")),
    ("rows", ("16x16",)),
    ("-t", ("columnwise", "stochastic")),
    ("d-", ("rowwise", "columnwise, Hadamard, stochastic")),
    ("dt", ("16x16", "columnwise, Hadamard", "columnwise, Hadamard, stochastic")),
    ("d+t", ("columnwise", "stochastic")),
)


def tensor(seed: int = 0) -> Array:
    """Its largest element lies on the last shard, a NaN on the first."""
    x = np.random.default_rng(seed).standard_normal((128, 128)).astype(np.float32)
    x[-1, -1], x[3, 5] = -50, np.nan
    return x.astype(BF16)


def placed(x: Array, mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def different(shards: list[shard.Shard]) -> int:
    return sum(each.different for each in shards)


def same(found: jaxpath.NVFP4Array, expected: nv.NVFP4Tensor) -> None:
    q = found.to_numpy()
    np.testing.assert_array_equal(q.packed, expected.packed)
    np.testing.assert_array_equal(q.scales, expected.scales)
    assert q.amax.tobytes() == expected.amax.tobytes()


def test_there_are_eight_devices() -> None:
    assert len(DEVICES) == 8


# -- quantize_sharded, held to check_sharded and to the whole tensor -------------------------------------------


@pytest.mark.parametrize("place, name", [(place, name) for place, names in PAIRS for name in names])
def test_equals_the_oracle(place: str, name: str) -> None:
    (mesh, spec), how, x = MESHES[place], shard.CALLS[name], tensor()
    rbits = KEY if "rounding" in how else None
    q = jax.jit(lambda x, rbits: quantize_sharded(x, mesh, spec, rbits=rbits, **how))(placed(x, mesh, spec), rbits)
    shards = check_sharded(q, x, axis=how.get("axis", -1), rbits=rbits, rht=how.get("rht"))
    assert len(shards) == 8 and different(shards) == 0
    if rbits is None:
        same(q, nv.quantize(x, **how))
    else:  # scales and amax do not depend on the random numbers
        expected = nv.quantize(x, **{k: v for k, v in how.items() if k != "rounding"})
        np.testing.assert_array_equal(np.asarray(q.scales), expected.scales)
        assert np.asarray(q.amax) == expected.amax
        others = check_sharded(q, x, axis=how.get("axis", -1), rbits=shard.shard_key(KEY, 0), rht=how.get("rht"))
        assert all(each.codes for each in others)  # those of another key


def test_any_tensor() -> None:
    """On one split, compiled once: the largest element on each shard in turn, zeros, subnormals, NaN, infinities."""
    run = jax.jit(partial(quantize_sharded, mesh=GRID, spec=P("d", "t")))
    cases = []
    for row in (0, 64):
        for column in (0, 32, 64, 96):
            x = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float32)
            x[row, column] = 99
            cases.append(x)
    cases += [np.zeros((128, 128), np.float32), tensor().astype(np.float32) * np.float32(2**-131)]
    one = np.zeros((128, 128), np.float32)
    one[127, 127] = np.uint32(1).view(np.float32)  # the least subnormal
    nan = tensor(2).astype(np.float32)
    nan[:64, :32] = np.nan
    infinite = nan.copy()
    infinite[100, 100] = -np.inf
    for x in (*cases, one, nan, infinite):
        q = run(placed(x, GRID, P("d", "t")))
        assert different(check_sharded(q, x)) == 0
        same(q, nv.quantize(x))


def test_inside_ones_own_shard_map() -> None:
    """Both directions in one call, each device with its own key, and amaxes over the axes named."""
    x, rht = tensor(), nv.RHT()

    def local(x: jax.Array, key: Any) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(("d", "t")))
        return jaxpath.quantize_both(x, rht=rht, rounding="stochastic", rbits=key, across=("d", "t"))

    row, column = (jaxpath.NVFP4Array(spec, spec, P()) for spec in (P("d", "t"), P("t", "d")))  # type: ignore[arg-type]
    run = jax.shard_map(local, mesh=GRID, in_specs=(P("d", "t"), P()), out_specs=(row, column))
    found = jax.jit(run)(x, KEY)
    sides: tuple[dict[str, Any], ...] = ({}, {"axis": 0, "rht": rht})
    plain = [nv.quantize(x, **how) for how in sides]
    for n in range(8):
        d, t = divmod(n, 4)
        part = x[64 * d : 64 * d + 64, 32 * t : 32 * t + 32]
        for side, (q, whole, how) in enumerate(zip(found, plain, sides, strict=True)):
            key = jax.random.fold_in(jax.random.fold_in(KEY, n), side)
            shape = part.shape if side == 0 else part.shape[::-1]
            rbits = np.asarray(stochastic.words(key, shape))
            expected = nv.quantize(part, amax=whole.amax, rounding="stochastic", rbits=rbits, **how)
            rows, blocks = (slice(64 * d, 64 * d + 64), 2 * t) if side == 0 else (slice(32 * t, 32 * t + 32), 4 * d)
            held = np.asarray(q.packed)[rows, 8 * blocks : 8 * blocks + shape[1] // 2]
            np.testing.assert_array_equal(held, expected.packed)
    assert [np.asarray(q.amax) for q in found] == [q.amax for q in plain]


def test_linear_across_devices() -> None:
    lines = list(shard.linear_operands(Mesh(DEVICES, ("d",)), KEY))
    assert len(lines) == 6 and all((line.devices, line.different) == (8, 0) for line in lines)


@pytest.mark.parametrize("name", ["16x16", "columnwise, Hadamard, stochastic"])
def test_jit_alone(name: str) -> None:
    """XLA partitions it; the words of a key are those of the whole tensor."""
    how, x = shard.CALLS[name], tensor()
    line = shard._partitioned(name, x, GRID, P("d", "t"), KEY, how, 1)
    assert (line.devices, line.elements, line.different) == (8, x.size, 0)


# -- faults are seen -------------------------------------------------------------------------------------------


def test_the_amax_of_a_shard_is_seen() -> None:
    """Each device under its own amax, in place of the whole tensor's."""
    x = tensor()
    result = jaxpath.NVFP4Array(P("d", "t"), P("d", "t"), P())  # type: ignore[arg-type]
    run = jax.shard_map(jaxpath.quantize, mesh=GRID, in_specs=P("d", "t"), out_specs=result, check_vma=False)
    shards = check_sharded(jax.jit(run)(x), x)
    wrong = [each for each in shards if each.different]
    assert len(wrong) == 7 and all(each.amax == 1 and each.scales for each in wrong)
    (right,) = set(shards) - set(wrong)
    assert right.region == ((64, 128), (96, 128))  # where the largest element is


def test_a_changed_byte_of_one_device_is_seen() -> None:
    x, spec = tensor(), P("d", None)  # each part is held by four devices
    q = jax.jit(partial(quantize_sharded, mesh=GRID, spec=spec))(x)
    parts = []
    for each in q.packed.addressable_shards:
        data = np.array(each.data)
        data[1, 2] ^= each.device == DEVICES[5]
        parts.append(jax.device_put(data, each.device))
    packed = jax.make_array_from_single_device_arrays(q.packed.shape, q.packed.sharding, parts)
    shards = check_sharded(jaxpath.NVFP4Array(packed, q.scales, q.amax, q.block, q.arithmetic), x)
    assert [each.device for each in shards if each.different] == [str(DEVICES[5])] and different(shards) == 1


def test_another_tensor_is_seen() -> None:
    q = jax.jit(partial(quantize_sharded, mesh=LINE, spec=P("t")))(tensor())
    assert different(check_sharded(q, tensor(9))) > 1000
    with pytest.raises(ValueError, match=r"that of a tensor \(128, 128\), with axis -1; x has shape \(64, 128\)"):
        check_sharded(q, tensor()[:64])


def fails(*given: Any) -> shard.Line:
    raise RuntimeError("no such instruction")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["shard", "--size", "128", "--threads", "1"])
    monkeypatch.setattr(shard, "CALLS", {"rowwise": {}})
    monkeypatch.setattr(shard, "layouts", lambda devices: iter([MESHES["dt"]]))
    monkeypatch.setattr(shard, "linear_operands", lambda mesh, key: [shard.Line("linear", "", mesh.size, 1, 0)])
    assert shard.main() == 0
    text = capsys.readouterr().out
    assert "8 x cpu, 128x128 bfloat16" in text and "0 differ, 0 failed;" in text and len(text.splitlines()) == 2 + 5 + 1
    found = [shard.Line("wrong", "", 8, 9, 1), shard.Line("right", "", 8, 9, 0)]
    monkeypatch.setattr(shard, "confirm", lambda *given: found)
    assert shard.main() == 1 and "1 differ, 0 failed;" in capsys.readouterr().out
    monkeypatch.setattr(shard, "confirm", lambda *given: [shard._tried(fails, "x", tensor(), *MESHES["dt"])])
    assert shard.main() == 1 and "RuntimeError: no such instruction" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["shard", "--size", "100"])
    with pytest.raises(SystemExit):
        shard.main()
    assert "size is a positive multiple of 128 on 8 devices" in capsys.readouterr().err


def test_layouts_split_differently() -> None:
    found = [(mesh.devices.shape, spec) for mesh, spec in shard.layouts(jax.devices())]
    assert found == [((1, 8), shard.SPECS[0]), ((1, 8), shard.SPECS[3]), *(((2, 4), spec) for spec in shard.SPECS[:3])]
    assert [mesh.devices.shape for mesh, _ in shard.layouts(jax.devices()[:2])] == [(1, 2), (1, 2)]
    assert [mesh.devices.shape for mesh, _ in shard.layouts(jax.devices()[:1])] == [(1, 1)]


# -- errors ----------------------------------------------------------------------------------------------------

WORDS = np.zeros((16, 16), np.uint32)
ROWS = {"arithmetic": nv.arithmetic("te", row_scaled=True)}
RANDOM = {"rounding": "stochastic"}
ERRORS: list[tuple[type[Exception], str, tuple[int, ...], P, dict[str, Any]]] = [
    (ValueError, r"a matrix and a spec of its two dimensions.*got shape \(2, 16, 64\)", (2, 16, 64), P("d"), {}),
    (ValueError, "a spec of its two dimensions", (16, 64), P("d", None, "t"), {}),
    (ValueError, r"names 'x'; the axes of the mesh are {'d': 2, 't': 4}", (16, 64), P("x"), {}),
    (ValueError, "96 columns .* not split into 4 shards of 16 columns .* to 128", (16, 96), P(None, "t"), {}),
    (ValueError, "48 rows .* 2 shards of 16 rows .*16x16 blocks", (48, 64), P("d"), {"block": (16, 16)}),
    (ValueError, "48 rows .* 8 shards of 16 rows .*axis 0", (48, 64), P(("d", "t")), {"axis": 0}),
    (ValueError, "7 rows .* 2 shards of the same length", (7, 64), P("d"), {}),
    (ValueError, "row-scaled tensors have no amax of the whole", (16, 64), P(), ROWS),
    (ValueError, "amax is the whole tensor's", (16, 64), P(), {"amax": 1.0}),
    (TypeError, r"one JAX key.*got uint32 \(16, 16\)", (16, 64), P(), RANDOM | {"rbits": WORDS}),
    (TypeError, "one JAX key.*got Philox", (16, 64), P(), RANDOM | {"rbits": nv.Philox(1, 2)}),
    (ValueError, "stochastic rounding needs rbits", (16, 64), P("d"), RANDOM),
]


@pytest.mark.parametrize("error, message, shape, spec, how", ERRORS, ids=[e[1][:30] for e in ERRORS])
def test_errors(error: type[Exception], message: str, shape: tuple[int, ...], spec: P, how: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        quantize_sharded(np.zeros(shape, BF16), GRID, spec, **how)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda x: quantize_sharded(x, GRID, spec, **how), jax.ShapeDtypeStruct(shape, BF16))
