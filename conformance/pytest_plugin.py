"""The pytest plug-in: an assertion, a fixture, and the suite run against a project's own quantizer.

    from conformance.pytest_plugin import assert_nvfp4_equal
    assert_nvfp4_equal(my_kernel(x), x)

    pytest --nvfp4-quantizer my_package.kernels:quantize

pytest loads this module in every run of an environment that has the package, so it imports nothing but the standard
library and pytest; everything else waits until it is asked for.  See docs/pytest.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

Function = TypeVar("Function", bound=Callable[..., Any])


def assert_nvfp4_equal(found: Any, x: Any, **how_it_was_quantized: Any) -> None:
    """Assert that ``found`` is, bit for bit, the NVFP4 quantization of ``x``.

    Args:
        found: (packed, scales) or (packed, scales, amax), or a dictionary of those: NumPy, torch or JAX arrays,
            packed uint8 (R, K/2), scales uint8 or float8_e4m3fn (R, K/16), compact, padded or swizzled, amax float32;
            an nvfp4ref.NVFP4Tensor; an nvfp4ref.Dump; a tensor of Transformer Engine, torchao, ModelOpt or
            compressed-tensors.
        x: the input, any float array of (…, K) that nvfp4ref.quantize takes.
        how_it_was_quantized: ``block``, ``axis``, ``rounding``, ``rbits``, ``rht``, ``amax``, ``arithmetic`` as for
            nvfp4ref.quantize, and ``scale_layout="swizzled"``.  Without ``arithmetic`` a package's object is held to
            that package's preset, and arrays to ``te``.
    Raises:
        AssertionError: it differs; the message counts what does, names the known deviations that explain it, and shows
            every intermediate of five elements.
        TypeError, ValueError: it cannot be judged: an unknown object or argument, random words that are missing.
    """
    __tracebackhide__ = True
    from conformance.assertion import assert_equal

    assert_equal(found, x, how_it_was_quantized)


def assert_pipe_conforms(
    command: Sequence[str],
    *,
    rules: Iterable[str] | None = None,
    count: int | None = None,
    seed: int = 0,
    timeout: float = 60.0,
) -> None:
    """Assert that a program answers every line of the pipe as the specification does (docs/pipe.md).

    Args:
        command: the program and its arguments.
        rules: ids of docs/spec.md; default all.
        count, seed: lines in all, and the seed of the random ones; default every constructed line.
        timeout: seconds without an answer after which it is stopped.
    Raises:
        AssertionError: an answer is wrong, or the answers are not whole, with the report.
        ValueError: the program cannot be started; a rule that the pipe does not have.
    """
    __tracebackhide__ = True
    from conformance.vectors.device import run
    from conformance.vectors.pipe import Plan

    outcome = run(command, Plan(None if rules is None else tuple(rules), count, seed), timeout)
    if outcome.exit_code:
        raise AssertionError(str(outcome))


# ---- a project's quantizer ---------------------------------------------------------------------------------


class Declaration(NamedTuple):
    """What a quantizer says about itself."""

    arithmetic: str | None = None
    arrays: str = "numpy"
    features: frozenset[str] | None = None


def nvfp4_quantizer(
    *, arithmetic: str | None = None, arrays: str = "numpy", features: Iterable[str] | None = None
) -> Callable[[Function], Function]:
    """Say what a function given to ``--nvfp4-quantizer`` follows, takes and can do.

    Args:
        arithmetic: the preset it follows; default the option ``--nvfp4-arithmetic``, else "te".
        arrays: what it takes as x: "numpy", "torch" or "jax".
        features: all that it can do: its dtypes ("float32", "bfloat16", "float16"), blocks ("1x16", "16x16"),
            directions ("row", "col") and "given-amax", "rht", "stochastic", "row_scaled", "four_over_six".  Cases that
            need anything else are not run.  Default: every case is run, and it may raise NotImplementedError.
    """
    if arrays not in ("numpy", "torch", "jax"):
        raise ValueError(f"arrays is 'numpy', 'torch' or 'jax'; got {arrays!r}")
    declared = Declaration(arithmetic, arrays, None if features is None else frozenset(features))

    def declare(function: Function) -> Function:
        function.nvfp4_declaration = declared  # type: ignore[attr-defined]
        return function

    return declare


# ---- pytest's hooks ----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plug-in."""
    group = parser.getgroup("nvfp4", "NVFP4 conformance")
    group.addoption(
        "--nvfp4-quantizer", action="append", metavar="MODULE:FUNCTION", help="run the suite against quantize(x, **kw)"
    )
    group.addoption("--nvfp4-backend", action="append", metavar="NAME", help="run the suite against a known backend")
    group.addoption("--nvfp4-suite", choices=["quick", "full"], help="which suite; default quick")
    group.addoption("--nvfp4-arithmetic", metavar="NAME", help="preset of quantizers that declare none; default te")
    group.addoption(
        "--nvfp4-diagnose", metavar="N|all", help="failures of a stage that are diagnosed, seconds each; default 3"
    )
    group.addoption("--nvfp4-xfails", metavar="FILE", help="cases expected to fail, an id a line")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing, unless the suite is asked for."""
    if config.getoption("nvfp4_quantizer") or config.getoption("nvfp4_backend"):
        from conformance.pytest_suite import Suite

        config.pluginmanager.register(Suite(config), "nvfp4-suite")
        return
    for option in ("suite", "diagnose", "xfails"):
        if config.getoption(f"nvfp4_{option}") is not None:
            raise pytest.UsageError(f"--nvfp4-{option} needs --nvfp4-quantizer MODULE:FUNCTION or --nvfp4-backend NAME")


@pytest.fixture(scope="session")
def nvfp4_oracle(pytestconfig: pytest.Config) -> Any:
    """The oracle: ``quantize``, ``dequantize`` and ``assert_equal`` under the arithmetic of ``--nvfp4-arithmetic``."""
    from conformance.pytest_suite import Oracle, preset

    return Oracle(preset(pytestconfig))
