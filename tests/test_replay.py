"""From a generator's state to the words of a run: nvfp4hw.rng, and the examples that use it."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nvfp4ref as nv
from nvfp4hw import rng

ROOT = Path(__file__).parent.parent


# ---- PyTorch -----------------------------------------------------------------------------------------------

#: torch.cuda.get_rng_state() after torch.cuda.manual_seed(0x123456789ABCDEF0) and one draw, on an H200
STATE_BYTES = bytes.fromhex("f0debc9a785634120400000000000000")


def test_the_state_of_a_cuda_generator() -> None:
    expected = (0x123456789ABCDEF0, 4)
    assert rng.torch_state(STATE_BYTES) == expected
    assert rng.torch_state(np.frombuffer(STATE_BYTES, np.uint8)) == expected
    cuda = SimpleNamespace(type="cuda")
    generator = SimpleNamespace(initial_seed=lambda: expected[0], get_offset=lambda: 4, device=cuda)
    assert rng.torch_state(generator) == expected
    negative = SimpleNamespace(initial_seed=lambda: -1, get_offset=lambda: 0, device=cuda)
    assert rng.torch_state(negative) == (2**64 - 1, 0)


def test_a_torch_tensor_of_the_state() -> None:
    torch = pytest.importorskip("torch")
    assert rng.torch_state(torch.tensor(list(STATE_BYTES), dtype=torch.uint8)) == (0x123456789ABCDEF0, 4)
    with pytest.raises(ValueError, match="got 5,056 items of uint8"):
        rng.torch_state(torch.get_rng_state())
    with pytest.raises(ValueError, match="draw from a CUDA generator.*got one on cpu"):
        rng.torch_state(torch.Generator())


@pytest.mark.parametrize(
    ("state", "says"),
    [(b"12345678", "got 8 items of uint8"), (np.zeros(2, np.int64), "got 2 items of int64"), (7, "got 1 item")],
)
def test_another_state_is_refused(state: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"16 bytes, seed and offset.*{says}"):
        rng.torch_state(state)


BF16: dict[str, Any] = {"dtype": "bfloat16"}

#: arguments -> (kernel, offset, both) of the rowwise and columnwise words, offset afterwards
LAUNCHES: list[tuple[Any, dict[str, Any], Any, Any, int]] = [
    ((128, 128), BF16, ("tuned-1d", 0, True), ("tuned-1d", 0, True), 1024),
    ((128, 128), BF16 | {"directions": "row"}, ("tuned-1d", 0, False), None, 1024),
    ((128, 128), BF16 | {"directions": "col"}, None, ("vector-blockwise", 0, False), 1024),
    ((128, 128), BF16 | {"block": (16, 16)}, ("2d", 0, True), ("2d", 0, True), 1024),
    ((144, 80), {"dtype": "float32"}, ("vector-blockwise", 0, True), ("vector-blockwise", 0, True), 1024),
    ((128, 128), BF16 | {"rht": True}, ("fused-rht", 0, True), ("fused-rht", 0, True), 1024),
    ((128, 128), BF16 | {"rht": True, "directions": "col"}, None, ("fused-rht", 0, False), 1024),
    ((144, 80), BF16 | {"rht": True}, ("vector-blockwise", 0, False), ("unfused-rht", 1024, False), 2048),
    (
        (128, 128),
        BF16 | {"rht": True, "fused": False},
        ("tuned-1d", 0, False),
        ("unfused-rht", 1024, False),
        2048,
    ),
    ((96, 64), BF16 | {"rht": True, "directions": "row"}, ("tuned-1d", 0, False), None, 1024),
    ((96, 64), BF16 | {"rht": True, "directions": "col"}, None, ("unfused-rht", 1024, False), 2048),
]


@pytest.mark.parametrize(("shape", "how", "row", "column", "after"), LAUNCHES)
def test_a_launch_of_pytorch(shape: Any, how: dict[str, Any], row: Any, column: Any, after: int) -> None:
    """DISPATCH, STREAM-UNFUSED-RHT"""
    found = rng.pytorch_launch((7, 0), shape, **how)
    for state, expected, axis in ((found.row, row, -1), (found.column, column, 0)):
        if expected is None:
            assert state is None
            continue
        assert state == nv.Philox(7, expected[1], expected[0], expected[2])
        state.words(shape, axis, dtype=how["dtype"], block=how.get("block", (1, 16)))
    assert found.next_offset == after


def test_unknown_directions_are_refused() -> None:
    for launch in (rng.pytorch_launch, rng.jax_launch):
        with pytest.raises(ValueError, match="'row', 'col' or 'both'; got 'rowwise'"):
            launch((7, 0), (128, 128), directions="rowwise")


# ---- JAX ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def helper() -> Any:
    """The installed package's own jax/quantize/helper.py."""
    from nvfp4hw.backends import _te_package, te_jax

    reason = te_jax.BACKEND().availability()
    if reason is not None:
        pytest.skip(reason)
    return _te_package.import_file("jax.quantize.helper", ("common", "jax"), te_jax._stand_ins())


@pytest.mark.parametrize("seed", [0, 7, 2**31])
def test_the_state_that_the_package_makes_of_a_key(helper: Any, seed: int) -> None:
    import jax

    key = jax.random.key(seed)
    config = helper.NVFP4ScalingQuantizeConfig.__new__(helper.NVFP4ScalingQuantizeConfig)
    config.DISABLE_STOCHASTIC_ROUNDING = False
    streams = {"sr_rng": key}
    module = SimpleNamespace(make_rng=streams.__getitem__)
    meta = config._make_stochastic_rounding_rng_state(module, helper.TensorSource.DGRAD, "grad")
    theirs = np.asarray(meta.get_kwargs_dictionary()["stochastic_rounding_rng_state"])
    np.testing.assert_array_equal(rng.jax_state(key), theirs)
    assert theirs.shape == (1, 4) and theirs.max() < 2**31


def test_devices_and_names_give_other_states() -> None:
    jax = pytest.importorskip("jax")
    key = jax.random.key(1)
    two = rng.jax_state(key, devices=2)
    assert two.shape == (2, 4) and two.dtype == np.uint32
    assert rng.jax_seed_offset(two, 1) != rng.jax_seed_offset(two, 0)
    assert (rng.jax_state(key, "other") != rng.jax_state(key)).any()


def test_seed_and_offset_of_a_state() -> None:
    state = np.array([1, 2, 3, 4], np.uint32)
    assert rng.jax_seed_offset(state) == (1 | 2 << 32, 3 | 4 << 32)
    assert rng.jax_seed_offset(np.stack([state, state + 1]), 1) == (2 | 3 << 32, 4 | 5 << 32)
    for wrong in (state.astype(np.int32), state[:3], state.reshape(1, 1, 4)):
        with pytest.raises(ValueError, match="four uint32 a device"):
            rng.jax_seed_offset(wrong)


def test_a_launch_of_jax() -> None:
    """One state for two launches."""
    found = rng.jax_launch((5, 6), (256, 256))
    assert found == (nv.Philox(5, 6, "auto"), nv.Philox(5, 6, "fused-rht-columnwise"), 6)
    found = rng.jax_launch((5, 6), (256, 256), rht=False)
    assert found[:2] == (nv.Philox(5, 6, "auto", True), nv.Philox(5, 6, "auto", True))
    assert rng.jax_launch((5, 6), (256, 256), directions="col").row is None
    assert rng.jax_launch((5, 6), (256, 256), directions="row").column is None


def test_uniforms_depend_on_the_number_of_elements_only() -> None:
    pytest.importorskip("jax")
    state = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.uint32)
    one = rng.jax_uniforms(state, (32, 16))
    assert one.dtype == np.float32 and one.min() >= 0 and one.max() < 1
    np.testing.assert_array_equal(rng.jax_uniforms(state[:1], (16, 32)).reshape(32, 16), one)
    assert (rng.jax_uniforms(state[1], (32, 16)) != one).mean() > 0.99


# ---- the examples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replay_pytorch", "replay_jax"])
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "replay_jax":
        pytest.importorskip("jax")
    assert runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]() == 0
    printed = capsys.readouterr().out
    if name == "replay_pytorch":
        assert printed.count(" 0 bytes differ") == 2 and "offset afterwards: 2048" in printed
    else:
        assert "0 of 65536 codes are 1.5" in printed and "1024 of 4096" in printed
