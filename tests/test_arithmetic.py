"""The variation points as data: values that are allowed, presets, and messages."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from inputs import NAN

import nvfp4ref as nv
from nvfp4ref.arithmetic import _CHOICES, PRESETS, Arithmetic, arithmetic

FREE = {
    "name", "headroom", "scale_nan_byte", "scale_invalid_byte", "scale_floor", "zero_block_scale", "nan_code",
    "nan_code_bfloat16", "nan_block_codes", "reciprocal_of_zero",
}  # fmt: skip


def test_every_field_is_free_or_a_choice() -> None:
    assert set(_CHOICES) | FREE == {f.name for f in fields(Arithmetic)}
    for name, choices in _CHOICES.items():
        assert len(choices) > 1 and len(set(choices)) == len(choices), name
        for choice in choices:
            assert getattr(arithmetic("te", **{name: choice}), name) == choice


@pytest.mark.parametrize("name", sorted(_CHOICES))
@pytest.mark.parametrize("value", ["nonsense", 7, None, 1, 1.0, 0, [], object], ids=str)
def test_a_field_takes_nothing_but_its_choices(name: str, value: Any) -> None:
    allowed = [c for c in _CHOICES[name] if type(c) is type(value) and c == value]
    if allowed:
        assert getattr(arithmetic("te", **{name: value}), name) == value
        return
    with pytest.raises(ValueError, match=f"{name} is one of .*; got") as raised:
        arithmetic("te", **{name: value})
    assert all(repr(c) in str(raised.value) for c in _CHOICES[name])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"headroom": 1.5}, "headroom is a factor from 0.5 to 1 .*; got 1.5"),
        ({"headroom": NAN}, "headroom is a factor from 0.5 to 1 .*; got nan"),
        ({"zero_block_scale": 256}, "zero_block_scale is a byte, 0..255; got 256"),
        ({"zero_block_scale": -1}, "zero_block_scale is a byte, 0..255; got -1"),
        ({"row_scaled": True, "global_scale": "none"}, "row_scaled needs a global scale"),
        ({"nan_code": 16}, "nan_code .*got 16"),
        ({"scale_nan_byte": 256}, "scale_nan_byte .*got 256"),
        ({"scale_floor": NAN}, "scale_floor .*got nan"),
        ({"scale_floor": -1.0}, "scale_floor .*got -1.0"),
    ],
    ids=str,
)
def test_free_fields_are_checked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        arithmetic("te", **changes)


def test_names_and_fields_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="unknown arithmetic 'TE'; the presets are te, .*four-over-six"):
        arithmetic("TE")
    no_names: tuple[Any, ...] = (None, 3, [])
    for no_name in no_names:
        with pytest.raises((ValueError, TypeError), match="arithmetic"):
            arithmetic(no_name)
    with pytest.raises(TypeError, match="no field speed, warp; its fields are .*amax_nan, .*row_scaled"):
        arithmetic("te", warp=9, speed=1)
    with pytest.raises(TypeError, match="no field name"):
        arithmetic("te", **{"name": "mine"})


def test_presets() -> None:
    assert nv.PRESETS is PRESETS and PRESETS["te"] == Arithmetic()
    for name, ar in PRESETS.items():
        assert ar.name == name and arithmetic(name) is not None and arithmetic(name) == ar and ar.fields() == {}
        assert arithmetic(ar) == ar
    for name in ("te", "te-fused-rht", "te-2.14", "te-fast-math", "te-reference", "four-over-six"):
        assert name in PRESETS
    approximate = {name for name, ar in PRESETS.items() if ar.division == "rcp-approx"}
    assert approximate == {"te-jax-gpu", "jax-nn-gpu"} and not PRESETS["te-jax-gpu"].flush_subnormals
    assert len({replace(ar, name="te") for ar in PRESETS.values()}) == len(PRESETS)


def test_values_compare_and_hash_and_do_not_change() -> None:
    changed = arithmetic("te", e4m3_max=256)
    assert changed == arithmetic(arithmetic("te"), e4m3_max=256) != arithmetic("te")
    assert hash(changed) == hash(arithmetic("te", e4m3_max=256))
    assert changed.fields() == {"e4m3_max": 256}
    assert replace(changed, name="mine").fields()["e4m3_max"] == 256
    assert PRESETS["te"].e4m3_max == 448
    with pytest.raises(FrozenInstanceError):
        changed.e4m3_max = 448  # type: ignore[misc]


def test_element_max() -> None:
    assert arithmetic("te").element_max == 6
    assert arithmetic("te", headroom=16 / 17).element_max == 6 * (16 / 17)


def test_quantize_takes_a_name_or_a_value() -> None:
    import numpy as np

    x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    by_name, by_value = nv.quantize(x, arithmetic="te-2.14"), nv.quantize(x, arithmetic=PRESETS["te-2.14"])
    assert by_name.arithmetic == by_value.arithmetic == PRESETS["te-2.14"]
    assert (by_name.packed == by_value.packed).all()
    with pytest.raises(ValueError, match="unknown arithmetic 'nope'; the presets are te"):
        nv.quantize(x, arithmetic="nope")
