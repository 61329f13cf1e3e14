"""NVFP4 in flax.linen and flax.nnx: what their layers compute, which keys they draw, and a transformer that trains."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4ref.recipe import GEMMS, recipe

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

from nvfp4hw.jaxpath.check import check  # noqa: E402
from nvfp4hw.jaxpath.flax_layers import STREAM, NnxDotGeneral, make_dot_general_cls  # noqa: E402
from nvfp4hw.jaxpath.linear import Call, observed  # noqa: E402

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
WIDTH = 64
X = np.random.default_rng(0).standard_normal((2, 16, WIDTH)).astype(np.float32)
KEY = jax.random.key(7)
RANDOM = {"params": jax.random.key(1)}


def dense(recipe_: Any = "te_nvfp4", **place: Any) -> nn.Dense:
    return nn.Dense(WIDTH, dot_general_cls=make_dot_general_cls(recipe_, **place))


def keys_of(calls: list[Call]) -> list[bytes]:
    return [call.keys.tobytes() for call in calls if call.keys is not None]


def assert_agree(calls: list[Call]) -> None:
    assert calls and not any(number for call in calls for number in check(call).values())


# -- flax.linen ------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two layers of the same shape, the second recomputed in the backward pass."""

    quantized: bool = True

    def setup(self) -> None:
        cls = make_dot_general_cls("te_nvfp4") if self.quantized else None
        self.first = nn.Dense(WIDTH, dot_general_cls=cls)
        self.second = nn.remat(nn.Dense)(WIDTH, dot_general_cls=cls)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nn.relu(self.first(x)))


@pytest.fixture(name="pair", scope="module")
def differentiated_pair() -> tuple[list[list[Call]], list[Any]]:
    """The calls and the gradients of three steps, the first and the last with the same key; float32 layers."""
    model, seen, gradients = Pair(), [], []
    weights = Pair(quantized=False).init(RANDOM, X)
    calls: list[Call] = []
    gradient = jax.jit(jax.grad(lambda w, key: (model.apply(w, X, rngs={STREAM: key}) ** 2).mean()))
    with observed(calls.append):
        for step in (0, 1, 0):
            gradients.append(jax.block_until_ready(gradient(weights, jax.random.fold_in(KEY, step))))
            jax.effects_barrier()
            seen.append(calls.copy())
            calls.clear()
    return seen, gradients


def test_linen_layers_are_linear(pair: tuple[list[list[Call]], list[Any]]) -> None:
    """Also a recomputed one, once a step; the gradient of a kernel is wgrad's result."""
    seen, gradients = pair
    for calls, gradient in zip(seen, gradients, strict=True):
        assert len(calls) == 2
        assert_agree(calls)
        found = {np.asarray(layer["kernel"]).T.tobytes() for layer in gradient["params"].values()}
        assert found == {call.results["wgrad"].tobytes() for call in calls}


def test_every_layer_and_step_draws_its_own_key(pair: tuple[list[list[Call]], list[Any]]) -> None:
    seen, gradients = pair
    assert len(set(keys_of(seen[0] + seen[1]))) == 4
    assert set(keys_of(seen[0])) == set(keys_of(seen[2]))
    first, second, again = (jax.tree.leaves(gradient) for gradient in gradients)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_linen_is_a_drop_in() -> None:
    """The same weights for the same key; the dtype of the result is that of a layer in float32 or bfloat16."""
    weights = [Pair(quantized).init(RANDOM, X) for quantized in (True, False)]
    assert jax.tree.structure(weights[0]) == jax.tree.structure(weights[1])
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, weights), strict=True))
    y = Pair().apply(weights[0], X)  # no keys without gradients
    assert y.dtype == np.float32
    plain = Pair(False).apply(weights[0], X)
    assert 0 < np.abs(y - plain).mean() < 0.3 * np.abs(plain).mean()
    layer = nn.Dense(WIDTH, dtype=jnp.bfloat16, dot_general_cls=make_dot_general_cls())
    assert layer.apply(layer.init(RANDOM, X), X).dtype == BF16


def test_attention_of_linen() -> None:
    """Kernels of more than two dimensions, contracted over one and over two"""
    cls = make_dot_general_cls("te", kind="attention")
    layers = [nn.MultiHeadDotProductAttention(4, qkv_dot_general_cls=c, out_dot_general_cls=c) for c in (cls, None)]
    weights = layers[0].init(RANDOM, X)
    found, plain = (np.asarray(layer.apply(weights, X)) for layer in layers)
    assert found.shape == X.shape and 0 < np.abs(found - plain).mean() < 0.4 * np.abs(plain).mean()


def test_layers_in_high_precision() -> None:
    """By kind and by block; their product is bfloat16's."""
    weights = nn.Dense(WIDTH).init(RANDOM, X)
    kernel = np.asarray(weights["params"]["kernel"])
    expected = jax.lax.dot_general(jnp.asarray(X, BF16), jnp.asarray(kernel, BF16), (((2,), (0,)), ((), ())))

    def quantized(layer: nn.Dense) -> bool:
        return not np.array_equal(layer.apply(weights, X), np.asarray(expected, np.float32))

    assert quantized(dense("mlp-only")) and not quantized(dense("mlp-only", kind="attention"))
    blocks = [quantized(dense("paper", block=block, blocks=62)) for block in (1, 2, 53, 54)]
    assert blocks == [False, True, True, False]


# -- flax.nnx --------------------------------------------------------------------------------------------------


class NnxPair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, recipe_: Any = "te_nvfp4", keys: nnx.Rngs | None = None) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, dot_general=NnxDotGeneral(recipe_, keys), rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, dot_general=NnxDotGeneral(recipe_, keys), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def test_nnx_layers_draw_new_keys_in_every_call() -> None:
    """Keys and counters are part of the state: the same seeds give the same first step."""
    model, same = (NnxPair(nnx.Rngs(0), keys=nnx.Rngs(1)) for _ in range(2))
    calls: list[Call] = []

    @nnx.jit
    def step(model: NnxPair) -> Any:
        return nnx.grad(lambda model: (model(jnp.asarray(X)) ** 2).mean())(model)

    with observed(calls.append):
        first = jax.tree.leaves(step(model))
        step(model)
        again = jax.tree.leaves(step(same))
        jax.effects_barrier()
    assert len(calls) == 6 and len(set(keys_of(calls))) == 4
    assert_agree(calls)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    kernel = np.asarray(model.first.kernel[...], BF16)
    assert sum(np.array_equal(call.w.T, kernel) for call in calls) == 3


def test_nnx_without_stochastic_rounding_or_gradients_takes_no_keys() -> None:
    assert NnxPair(nnx.Rngs(0))(jnp.asarray(X)).dtype == np.float32
    nearest = recipe("te", disable_stochastic_rounding=True)
    layer = NnxDotGeneral(nearest, nnx.Rngs(params=0))
    assert layer.keys is None
    assert NnxDotGeneral("mlp-only", nnx.Rngs(0), kind="attention").keys is None


def test_nnx_draws_no_keys_when_it_evaluates() -> None:
    """So that a model that is closed over changes no state."""
    model = NnxPair(nnx.Rngs(0), keys=nnx.Rngs(1))
    before = jax.tree.leaves(nnx.state(model))
    model.eval()
    y = jax.jit(lambda x: model(x))(jnp.asarray(X))
    after = jax.tree.leaves(nnx.state(model))
    assert all(np.array_equal(str(a), str(b)) for a, b in zip(before, after, strict=True))
    model.train()
    assert np.array_equal(np.asarray(model(jnp.asarray(X))), np.asarray(y))
    assert [str(a) for a in jax.tree.leaves(nnx.state(model))] != [str(a) for a in before]


# -- errors ----------------------------------------------------------------------------------------------------


def gradient_of(layer: nn.Dense, x: Any = X, **rngs: Any) -> Any:
    weights = jax.eval_shape(layer.init, RANDOM, x)
    return jax.eval_shape(jax.grad(lambda w: layer.apply(w, x, rngs=rngs).sum()), weights)


def test_a_missing_stream_is_named() -> None:
    with pytest.raises(ValueError, match="pass a JAX key .* rngs={'sr_rng'"):
        gradient_of(dense())
    gradient_of(dense(), **{STREAM: KEY})
    gradient_of(dense(), params=KEY)  # Flax's fallback
    gradient_of(dense(recipe("te", disable_stochastic_rounding=True)))
    gradient_of(dense(recipe("te", backward_override="dequantized")))
    gradient_of(dense(stream="dropout"), dropout=KEY)
    with pytest.raises(ValueError, match=r"neither a stream 'sr_rng' nor a default one .*nnx.Rngs\(params=0, sr_rng=1"):
        NnxDotGeneral("te", nnx.Rngs(params=0))


def test_misaligned_layers() -> None:
    with pytest.raises(ValueError, match="48 input features .* no multiple of 32: pad with zeros to 64"):
        gradient_of(dense(), X[..., :48], **{STREAM: KEY})
    with pytest.raises(ValueError, match="18 tokens .* no multiple of 32"):
        gradient_of(dense(), X[:, :9], **{STREAM: KEY})
    layer = nn.Dense(10, dot_general_cls=make_dot_general_cls())
    with pytest.raises(ValueError, match="10 output features .* no multiple of 16: pad with zeros to 32") as error:
        jax.eval_shape(layer.init, RANDOM, X)
    assert error.value.__notes__[0] == "in the Flax module NVFP4DotGeneral_0"


def test_recipes_that_cannot_be_followed() -> None:
    for make in (make_dot_general_cls, NnxDotGeneral):
        with pytest.raises(ValueError, match="unknown recipe 'te_nvfp8'"):
            make("te_nvfp8")
        with pytest.raises(ValueError, match="first 2 and the last 8 blocks in high precision: say block= and blocks="):
            make("paper")
        with pytest.raises(ValueError, match=r"block is 0\.\.61"):
            make("paper", block=62, blocks=62)
        with pytest.raises(ValueError, match="keeps 10 blocks in high precision, and there are 6: nothing would be"):
            make("paper", block=3, blocks=6)
        with pytest.raises(ValueError, match="kind is 'attention' or 'mlp', of which the recipe 'mlp-only' speaks"):
            make("mlp-only", kind="attn")


def test_arguments_that_have_no_meaning_here() -> None:
    product = NnxDotGeneral("te")
    with pytest.raises(TypeError, match="does not take out_sharding; got 'somewhere'"):
        product(jnp.asarray(X), jnp.zeros((WIDTH, 32)), (((2,), (0,)), ((), ())), out_sharding="somewhere")
    batch = (((2,), (1,)), ((0,), (0,)))
    with pytest.raises(ValueError, match="no batch dimensions"):
        product(jnp.asarray(X), jnp.zeros((2, WIDTH, 32)), batch)


# -- a transformer ---------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent.parent / "examples" / "flax_drop_in.py"
STEPS = 200


@pytest.fixture(name="example", scope="module")
def imported() -> Iterator[ModuleType]:
    pytest.importorskip("optax")
    spec = importlib.util.spec_from_file_location("flax_drop_in", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flax_drop_in", module)  # Flax's modules are dataclasses, which look there
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(name="runs", scope="module")
def trained(example: ModuleType) -> tuple[list[Call], list[float], list[float], list[float]]:
    """The calls of the first step; the losses of 200 steps in te_nvfp4, of its first steps again, and of bfloat16."""
    text = (SCRIPT.parent.parent / "LICENSE").read_bytes()
    calls: list[Call] = []
    layers = 4 * example.BLOCKS
    with observed(lambda call: calls.append(call) if len(calls) < layers else None):
        trainer = example.Trainer("te_nvfp4")
        again = trainer.run(1, text)
        jax.effects_barrier()
        losses = trainer.run(STEPS, text)
    again = trainer.run(20, text)
    return calls, losses, again, example.Trainer(None).run(STEPS, text)


def test_every_operand_of_the_first_step_is_the_oracles(
    example: ModuleType, runs: tuple[list[Call], list[float], list[float], list[float]]
) -> None:
    """Of every layer of every block, fprop, dgrad and wgrad; y, dx and dw are within the bounds."""
    calls = runs[0]
    width = example.WIDTH
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    assert sorted(call.w.shape for call in calls) == sorted(shapes * example.BLOCKS)
    assert len(set(keys_of(calls))) == len(calls)
    assert all({*GEMMS} < {*check(call)} and len(check(call)) == 9 for call in calls)
    assert_agree(calls)


def test_it_learns_as_bfloat16_does(runs: tuple[list[Call], list[float], list[float], list[float]]) -> None:
    """The mean of the last 20 steps is 10 % below what bfloat16 has after 20 to 40, and within 5 % of its last 20."""
    _, losses, _, plain = runs
    assert len(losses) == STEPS and np.isfinite(losses).all()
    last, last_plain = np.mean(losses[-20:]), np.mean(plain[-20:])
    assert last < 0.9 * np.mean(plain[20:40])
    assert abs(last - last_plain) < 0.05 * last_plain
    assert losses != plain


def test_it_is_deterministic(runs: tuple[list[Call], list[float], list[float], list[float]]) -> None:
    _, losses, again, _ = runs
    assert again == losses[: len(again)]


def test_the_command_prints_the_losses(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With another recipe and text; what it cannot use it refuses."""

    class Untrained(example.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, recipe: str | None) -> None:
            self.recipe = recipe

        def run(self, steps: int, text: bytes, report: Any) -> list[float]:
            return [len(text) / (1 + i) + (self.recipe is None) for i in range(steps)]

    monkeypatch.setattr(example, "Trainer", Untrained)
    text = tmp_path / "text"
    text.write_bytes(bytes(100))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--recipe", "mlp-only", "--steps", "10", "--text", str(text)])
    assert example.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "bfloat16", "mlp-only"] and len(lines) == 12
    assert lines[2].split() == ["2", "51.0000", "50.0000"]
    for wrong, words in ((["--recipe", "paper"], "block= and blocks="), (["--steps", "0"], "at least one step")):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *wrong])
        with pytest.raises(SystemExit):
            example.main()
        assert words in capsys.readouterr().err
