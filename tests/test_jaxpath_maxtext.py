"""The adapter for MaxText: against MaxText itself where it is installed, and everywhere against its interface as read.

What was read in MaxText 0.2.5, layers/quantizations.py and layers/linears.py: a linear layer calls
``quant.dot_general_cls(mesh_axes=…)()``, which gives a linen module; wraps it in ToNNX with the layer's streams;
initialises it on ``quant.get_block_size()`` tokens of zeros; drops the streams unless ``quant.needs_apply_rngs``; and
calls it as ``f(inputs, kernel, ((axis, contracted), ((), ())), precision=None, mutable=["aqt"])`` with the kernel
(in features …, out features …) in the dtype of the inputs.  Elsewhere ``quant.quant_mode`` is compared, the object is
compared and hashed, and MoE and the KV cache call ``quant.einsum(…)``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4ref.recipe import RECIPES

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

from nvfp4hw.jaxpath import maxtext  # noqa: E402
from nvfp4hw.jaxpath.check import check  # noqa: E402
from nvfp4hw.jaxpath.linear import Call, observed  # noqa: E402

Array = np.ndarray[Any, Any]
FOLDER = Path(__file__).parent.parent / "examples" / "maxtext"
BF16 = np.dtype(ml_dtypes.bfloat16)
X = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(BF16)

needs_maxtext = pytest.mark.skipif(
    importlib.util.find_spec("maxtext") is None, reason="MaxText is not installed (Python 3.12, maxtext 0.2.5)"
)


def settings(quantization: str = "te_nvfp4", **changes: Any) -> SimpleNamespace:
    """The fields of MaxText's configuration that are read."""
    given = {"use_qwix_quantization": False, "use_batch_split_schedule": False, "scan_layers": False}
    return SimpleNamespace(**given | {"quantization": quantization} | changes)


class LinearAsRead(nnx.Module):
    """MaxText's DenseGeneral, as far as it concerns quantization."""

    def __init__(self, features: int, shape: tuple[int, ...], quant: Any, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (features, *shape)) / 8)
        self.dot_general = nnx.bridge.ToNNX(quant.dot_general_cls(mesh_axes=("embed", "mlp"))(), rngs=rngs)
        self.dot_general.lazy_init(*self.operands(jnp.zeros((quant.get_block_size(), features), BF16)), precision=None)
        if not quant.needs_apply_rngs:
            self.dot_general.rngs = None

    def operands(self, x: jax.Array) -> tuple[Any, ...]:
        return x, jnp.asarray(self.kernel[...], x.dtype), (((x.ndim - 1,), (0,)), ((), ()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dot_general(*self.operands(x), precision=None, mutable=["aqt"])


def assert_a_layer_steps(layer: Any, name: str, shape: tuple[int, ...]) -> None:
    """Two compiled steps: the quantized product, its operands the oracle's, new keys in each."""
    calls: list[Call] = []

    @nnx.jit
    def step(layer: Any, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda layer: layer(x).astype(jnp.float32).var())(layer)

    with observed(calls.append):
        for _ in range(2):
            _, gradient = step(layer, jnp.asarray(X))
        jax.effects_barrier()
    assert len(calls) == 2 and all(call.recipe == RECIPES[name] for call in calls)
    assert not any(number for call in calls for number in check(call).values())
    assert len({call.keys.tobytes() for call in calls if call.keys is not None}) == 2
    kernel = np.asarray(nnx.to_pure_dict(gradient)["kernel"])
    assert kernel.shape == (64, *shape) and kernel.dtype == np.float32
    # MaxText makes the kernel bfloat16, so that its gradient passes through bfloat16
    assert any(np.array_equal(kernel.reshape(64, -1), call.results["wgrad"].T.astype(BF16)) for call in calls)
    assert layer(jnp.asarray(X)).shape == (*X.shape[:2], *shape) and layer(jnp.asarray(X)).dtype == BF16


# -- the interface as read -------------------------------------------------------------------------------------


def test_a_layer_as_read() -> None:
    quant = maxtext.of_config(settings())
    assert_a_layer_steps(LinearAsRead(64, (4, 24), quant, nnx.Rngs(params=0, dropout=1)), "te_nvfp4", (4, 24))


@pytest.mark.parametrize("name", maxtext.NAMES)
def test_a_name_is_a_recipe(name: str) -> None:
    module = maxtext.of_config(settings(name)).dot_general_cls(mesh_axes=())()
    assert module.layer.quantized and module.layer.recipe == RECIPES[name]


def test_what_maxtext_asks_of_the_object() -> None:
    quant = maxtext.NVFP4Quantization("te_nvfp4")
    assert quant == maxtext.NVFP4Quantization("te_nvfp4") != maxtext.NVFP4Quantization("te_nvfp4_no_rht")
    assert hash(quant) == hash(maxtext.NVFP4Quantization("te_nvfp4"))
    assert quant.quant_mode == "train" and quant.needs_apply_rngs and quant.get_block_size() % 32 == 0
    with pytest.raises(ValueError, match=r"quantization=te_nvfp4 has no einsum \(MoE, KV cache\)"):
        quant.einsum(mesh_axes=())
    with pytest.raises(ValueError, match="answers for quantization=te_nvfp4 and te_nvfp4_no_rht; got 'te_mxfp8'"):
        maxtext.NVFP4Quantization("te_mxfp8")


def test_configurations_under_which_maxtext_would_not_quantize() -> None:
    for name in ("use_qwix_quantization", "use_batch_split_schedule"):
        with pytest.raises(ValueError, match=f"does not go with {name}=true"):
            maxtext.of_config(settings(**{name: True}))
    with pytest.warns(UserWarning, match="same random words: set scan_layers=false"):
        maxtext.of_config(settings(scan_layers=True))


def test_install_answers_for_two_names_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ModuleType("maxtext.layers")
    layers.quantizations = SimpleNamespace(  # type: ignore[attr-defined]
        configure_quantization=lambda config, quant_mode_str="train": (config.quantization, quant_mode_str)
    )
    monkeypatch.setitem(sys.modules, "maxtext", ModuleType("maxtext"))
    monkeypatch.setitem(sys.modules, "maxtext.layers", layers)
    maxtext.install()
    installed = layers.quantizations.configure_quantization
    maxtext.install()
    assert layers.quantizations.configure_quantization is installed
    assert installed(settings("te_nvfp4_no_rht"), "serve") == maxtext.NVFP4Quantization("te_nvfp4_no_rht")
    assert installed(settings("te_mxfp8"), "serve") == ("te_mxfp8", "serve")
    assert installed(settings("")) == ("", "train")


def test_the_configuration_of_the_example() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((FOLDER / "nvfp4.yml").read_text(encoding="utf-8"))
    assert maxtext.of_config(settings(**{k: config[k] for k in ("quantization", "scan_layers")})).name == "te_nvfp4"
    heads = config["base_num_query_heads"] * config["head_dim"]
    tokens = config["max_target_length"] * config["per_device_batch_size"]
    for length in (config["base_emb_dim"], config["base_mlp_dim"], heads, tokens):
        assert length % 32 == 0


# -- MaxText itself --------------------------------------------------------------------------------------------


@needs_maxtext
@pytest.mark.parametrize("name", maxtext.NAMES)
def test_a_layer_of_maxtext(name: str) -> None:
    maxtext.install()
    from maxtext.layers import linears, quantizations

    quant = quantizations.configure_quantization(settings(name))
    assert isinstance(quant, maxtext.NVFP4Quantization)
    interface = {member for member in vars(quantizations.Quantization) if not member.startswith("_")}
    assert interface <= {member for member in dir(quant) if not member.startswith("_")}
    for other, expected in (("", type(None)), ("fp8", quantizations.Fp8Quantization)):
        assert isinstance(quantizations.configure_quantization(settings(other)), expected)
    layer = linears.DenseGeneral(
        in_features_shape=64,
        out_features_shape=(4, 24),
        quant=quant,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(params=0, dropout=1),
    )
    assert_a_layer_steps(layer, name, (4, 24))


@needs_maxtext
def test_maxtext_trains() -> None:
    """The example: one block of seven linear layers, two steps, every call with words of its own; 0 differences."""
    path = os.pathsep.join([str(FOLDER.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(FOLDER / "train.py"), "steps=2"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert run.returncode == 0, run.stderr
    assert "14 calls of quantized layers, 14 sets of random words" in run.stdout
    assert [line.split()[-1] for line in run.stdout.splitlines() if line.startswith("  ")][-9:] == ["0"] * 9
    assert "completed step: 1" in run.stderr
