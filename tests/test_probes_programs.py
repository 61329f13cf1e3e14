"""The probes' CUDA sources: their models and layouts, built by a plain C++ compiler, and their machine code by nvcc."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvfp4hw import probes
from nvfp4hw.probes import conversions, hadamard, mma, runs, stochastic, toolchain
from nvfp4hw.probes.__main__ import CI_TARGETS, targets
from nvfp4hw.probes.base import Output, ProbeError
from nvfp4ref import tensorcore
from nvfp4ref.fp32 import from_bfloat16
from nvfp4ref.hadamard import RHT

Array = np.ndarray[Any, Any]
FOLDER = Path(probes.__file__).parent
CXX = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")

#: Run the program of a source in its simulation: (source, *options) -> what it left.
Simulate = Callable[..., Output]


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    folder = tmp_path_factory.mktemp("programs")

    def run(source: str, *options: str, inputs: dict[str, bytes] | None = None) -> Output:
        program = folder / source.removesuffix(".cu")
        if not program.exists():
            flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
            subprocess.run([str(CXX), *flags, "-x", "c++", str(FOLDER / source), "-o", str(program)], check=True)
        return toolchain.execute([str(program)], inputs or {}, 60, {}, options)

    return run


# ---- the models in C++ against the oracle ------------------------------------------------------------------

#: Stretches of float32 patterns with everything that happens: zeros, subnormals, ties, saturation, Inf, NaN, signs.
WINDOWS = (
    (0x00000000, 3000),
    (0x007FFF00, 600),
    (0x3A800000 - 500, 1000),
    (0x3C7FFF00, 600),
    (0x3E7FFF00, 600),
    (0x3F9FFF00, 600),
    (0x40BFFF00, 70000),
    (0x43DFFF00, 600),
    (0x43E7FF00, 600),
    (0x7F7FFF00, 600),
    (0x7FFFFF00, 600),
    (0xBE7FFF00, 600),
    (0xFF7FFF00, 600),
    (0xFFFFFF00, 256),
)


def windows(first: int, count: int) -> tuple[str, str]:
    return f"first={first}", f"count={count}"


@needs_compiler
@pytest.mark.parametrize("form", ["e2m1", "e4m3"])
def test_nearest_even_in_cxx_is_the_oracles(simulate: Simulate, form: str) -> None:
    encode, last, sign = conversions.NEAREST[form]
    for first, count in WINDOWS:
        output = simulate(f"rn_{form}.cu", *windows(first, count))
        assert output.one("verdict") == "PASS"
        found = runs.read_runs(output, "runs.bin")
        found.check()
        expected = runs.float_runs(encode, 2, last, sign, first=first, count=count)
        assert runs.compare(found, expected, lambda curve, point: {"x": hex(point)}) == (0, [])


@needs_compiler
@pytest.mark.parametrize("source", ["rs_e2m1.cu", "rs_e4m3.cu", "rs_model.cu"])
def test_stochastic_rounding_in_cxx_is_the_oracles(simulate: Simulate, source: str) -> None:
    probe = next(probes.load(name) for name in probes.names() if probes.load(name).source == source)
    assert isinstance(probe, stochastic.StochasticProbe)
    for first, count in ((0x3F9FF000, 5000), (0x7F7FFF80, 300), (0xC0BFFF00, 300)):
        output = simulate(source, *windows(first, count), "fields=1024")
        assert output.one("verdict") == "PASS"
        for file, (rule, over) in probe.sweeps.items():
            found = runs.read_runs(output, file)
            found.check()
            if over == "patterns":
                encode = functools.partial(stochastic.encode_curves, rule)
                curves = 4 * stochastic.WORDS
                expected = runs.float_runs(encode, curves, rule.last, rule.sign, first=first, count=count)
                assert runs.compare(found, expected, stochastic.describe_pattern) == (0, [])
            else:
                whole = stochastic.expected_thresholds(rule)
                assert np.array_equal(found.code, whole.code) and np.array_equal(found.place, whole.place)


@needs_compiler
def test_the_hadamard_model_in_cxx_is_the_oracles(simulate: Simulate) -> None:
    output = simulate("rht.cu", "chunks=8", "digested=8")
    digests = output.array("digests.bin", "<u8")
    samples = output.array("samples.bin", "<u4", (8, hadamard.SAMPLED, 16))
    for chunk in range(8):
        digest, sampled = hadamard.expected(chunk)
        assert int(digests[chunk]) == digest and np.array_equal(samples[chunk], sampled)


@needs_compiler
def test_the_reciprocal_in_cxx_is_rounded_to_nearest(simulate: Simulate) -> None:
    """The simulation's table holds no error, so what it predicts is the correctly rounded reciprocal."""
    output = simulate("rcp.cu", *windows(0x3F800000, 3000))
    assert output.one("verdict") == "PASS" and not output.array("table.bin", np.int8).any()


@needs_compiler
@pytest.mark.parametrize("source", ["mma_sm120.cu", "mma_sm100.cu"])
def test_the_mma_model_in_cxx_is_the_oracles(simulate: Simulate, source: str) -> None:
    output = simulate(source, inputs={"tiles.bin": mma.tiles().file()})
    assert output.one("verdict") == "PASS"
    expected = mma.predicted("blackwell")
    assert np.array_equal(output.array("words.bin", "<u4", expected.shape), expected)


@needs_compiler
@pytest.mark.parametrize(
    ("source", "fault", "options"),
    [
        ("rn_e2m1.cu", "swapped-operands", windows(0x3F800000, 100)),
        ("rn_e4m3.cu", "nan-zero", windows(0x7FC00000, 100)),
        ("rs_e2m1.cu", "operands-reversed", (*windows(0x3F980000, 100), "fields=64")),
        ("rs_e2m1.cu", "one-less", (*windows(0x3FA00000, 100), "fields=64")),
        ("rs_e4m3.cu", "no-bit-reversal", (*windows(0x3F880000, 100), "fields=64")),
        ("rs_model.cu", "one-less", (*windows(0x3FA00000, 100), "fields=64")),
        ("rcp.cu", "no-flush", windows(0x7F000000, 100)),
        ("rht.cu", "24-bits", ("chunks=4", "digested=4")),
        ("rht.cu", "dropped-product", ("chunks=1", "digested=1")),
        ("mma_sm120.cu", "swapped-rows", ()),
    ],
)
def test_the_programs_own_comparison_finds_a_planted_fault(
    simulate: Simulate, source: str, fault: str, options: tuple[str, ...]
) -> None:
    inputs = {"tiles.bin": mma.tiles().file()[: 3 * 22144]} if source.startswith("mma") else {}
    output = simulate(source, f"fault={fault}", *options, inputs=inputs)
    assert output.one("verdict") == "FAIL" and output.integers("different")[0] > 0
    assert 1 <= len(output.lines["counterexample"]) <= 24


@needs_compiler
def test_a_program_says_why_it_cannot_run(simulate: Simulate) -> None:
    with pytest.raises(ProbeError, match="status 3: cannot run: cannot read .*tiles.bin"):
        simulate("mma_sm120.cu")


# ---- what the tensor cores would read, by the text of the PTX ISA ------------------------------------------

FRAGMENT = np.dtype([("a", "<u4", 4), ("b", "<u4", 2), ("c", "<u4", 4), ("sa", "<u4"), ("sb", "<u4")])
TILES = 6  # two of layout words, four of vectors


def few_tiles() -> bytes:
    return mma.tiles().file()[: TILES * 22144]


def nibble(words: Array, i: int) -> Array:
    """Element i of registers that hold eight 4-bit elements each, lowest first."""
    return (words[..., i // 8] >> np.uint32(4 * (i % 8)) & np.uint32(15)).astype(np.uint8)


def scale_bytes(words: Array) -> Array:
    return np.ascontiguousarray(words).astype("<u4").view(np.uint8).reshape(*words.shape, 4)


@needs_compiler
@pytest.mark.parametrize("thread_id_a", [0, 1])
@pytest.mark.parametrize("thread_id_b", [0, 1, 2, 3])
def test_the_fragments_of_mma_sync_hold_the_tile(simulate: Simulate, thread_id_a: int, thread_id_b: int) -> None:
    """PTX ISA, Matrix Fragments for mma.m16n8k64 and Block Scaling, read element by element; D is then the oracle's."""
    output = simulate("mma_sm120.cu", "dump=1", inputs={"tiles.bin": few_tiles()})
    fragments = output.array("fragments.bin", FRAGMENT, (TILES, 8, 4, 32))
    shape = (TILES, 8, 4)
    a, b = np.zeros((*shape, 16, 64), np.uint8), np.zeros((*shape, 8, 64), np.uint8)
    c = np.zeros((*shape, 16, 8), np.uint32)
    sa, sb = np.zeros((*shape, 16, 4), np.uint8), np.zeros((*shape, 8, 4), np.uint8)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        held = fragments[:, :, :, lane]
        for i in range(32):
            row = group if i < 8 or 16 <= i < 24 else group + 8
            column = thread * 8 + (i & 7) + (32 if i >= 16 else 0)
            a[:, :, :, row, column] = nibble(held["a"], i)
        for i in range(16):
            b[:, :, :, group, thread * 8 + (i & 7) + (32 if i >= 8 else 0)] = nibble(held["b"], i)
        for i in range(4):
            c[:, :, :, group if i < 2 else group + 8, thread * 2 + (i & 1)] = held["c"][..., i]
        if thread // 2 == thread_id_a:  # two threads of each four give A's scales: rows g and g + 8
            sa[:, :, :, group + 8 * (thread % 2)] = scale_bytes(held["sa"])
        if thread == thread_id_b:
            sb[:, :, :, group] = scale_bytes(held["sb"])
    for t, i, j in np.ndindex(shape):
        m, n = (index.reshape(-1) for index in np.indices((16, 8)))
        d = tensorcore.mma_words(
            a[t, i, j, m], b[t, i, j, n], c[t, i, j].reshape(-1).view(np.float32), sa[t, i, j, m], sb[t, i, j, n]
        )
        here = mma.predicted("blackwell")[t, 16 * i : 16 * i + 16, 8 * j : 8 * j + 8]
        assert np.array_equal(d.view(np.uint32).reshape(16, 8), here)


IMAGE = np.dtype(
    [
        ("descriptor_a", "<u8"),
        ("descriptor_b", "<u8"),
        ("instruction", "<u4"),
        ("d_column", "<u4"),
        ("sa_column", "<u4"),
        ("sb_column", "<u4"),
        ("shared", "u1", 8192),
        ("tensor", "<u4", (128, 64)),
    ]
)


def bits(word: int, low: int, high: int) -> int:
    return int(word) >> low & ((1 << (high - low + 1)) - 1)


def matrix_in_shared_memory(shared: Array, descriptor: int, rows: int) -> Array:
    """PTX ISA, shared memory descriptor and K-major layout without swizzling: codes (rows, 64)."""
    start, leading, stride = (bits(descriptor, low, low + 13) << 4 for low in (0, 16, 32))
    assert bits(descriptor, 46, 48) == 1  # the constant
    assert bits(descriptor, 14, 15) == bits(descriptor, 30, 31) == 0  # reserved
    assert bits(descriptor, 49, 51) == 0  # base offset
    assert bits(descriptor, 52, 52) == 0  # the leading dimension is a relative offset
    assert bits(descriptor, 53, 60) == 0  # the other constant
    assert bits(descriptor, 61, 63) == 0  # no swizzling
    assert all(value % 16 == 0 for value in (start, leading, stride))
    codes = np.zeros((rows, 64), np.uint8)
    for row in range(rows):
        for k in range(64):
            # ((8, m), (T, 2)) : ((T, stride), (1, leading)) in 4-bit elements, T = 32 of them to 16 bytes
            at = row % 8 * 32 + row // 8 * stride * 2 + k % 32 + k // 32 * leading * 2
            codes[row, k] = shared[start + at // 2] >> (4 * (at % 2)) & 15
    return codes


@needs_compiler
def test_shared_and_tensor_memory_of_tcgen05_hold_the_tile(simulate: Simulate) -> None:
    """PTX ISA, tcgen05: descriptors, shared memory layout, scale factors and D in tensor memory; D is the oracle's."""
    output = simulate("mma_sm100.cu", "dump=1", inputs={"tiles.bin": few_tiles()})
    for t, image in enumerate(output.array("images.bin", IMAGE, (TILES,))):
        instruction = int(image["instruction"])
        assert bits(instruction, 7, 9) == 1 and bits(instruction, 10, 11) == 1  # both E2M1
        n, m = bits(instruction, 17, 22) << 3, bits(instruction, 27, 28) << 7
        assert (m, n) == (128, 32)
        assert bits(instruction, 23, 23) == 0  # scales are UE4M3
        # dense, scale ids 0, nothing negated or transposed, K = 64, reserved bits 0
        assert instruction & ~(0x7 << 7 | 0x3 << 10 | 0x3F << 17 | 0x3 << 27) == 0
        a = matrix_in_shared_memory(image["shared"], image["descriptor_a"], m)
        b = matrix_in_shared_memory(image["shared"], image["descriptor_b"], n)
        tensor = image["tensor"]
        sa_column, sb_column, first = (int(image[f"{name}_column"]) for name in ("sa", "sb", "d"))
        partitions = tensor.reshape(4, 32, 64)[:, :, sa_column : sb_column + 1]
        assert (partitions == partitions[0]).all()  # the same scales in every 32 lanes
        sa = scale_bytes(np.stack([tensor[row % 32, sa_column + row // 32] for row in range(m)]))
        sb = scale_bytes(tensor[:n, sb_column])
        c = np.ascontiguousarray(tensor[:m, first : first + n])
        assert first + n <= sa_column and sa_column + 4 <= sb_column < tensor.shape[1]
        rows, columns = (index.reshape(-1) for index in np.indices((m, n)))
        d = tensorcore.mma_words(a[rows], b[columns], c.reshape(-1).view(np.float32), sa[rows], sb[columns])
        assert np.array_equal(d.view(np.uint32).reshape(m, n), mma.predicted("blackwell")[t])


TRANSFORM = np.dtype([("descriptor_a", "<u8"), ("descriptor_b", "<u8"), ("instruction", "<u4"), ("shared", "u1", 8192)])


@needs_compiler
def test_shared_memory_of_the_hadamard_program_holds_vectors_and_matrix(simulate: Simulate) -> None:
    """PTX ISA, instruction descriptor for .kind::f16, and the same layout of shared memory."""
    output = simulate("rht_tcgen05.cu", "chunks=1", "digested=1", "dump=6")
    assert output.one("verdict") == "PASS"
    kind = np.dtype(TRANSFORM.descr, align=True)
    for chunk, image in enumerate(output.array("images.bin", kind, (6,))):
        instruction = int(image["instruction"])
        assert bits(instruction, 4, 5) == 1 and bits(instruction, 7, 9) == bits(instruction, 10, 12) == 1  # F32, BF16
        n, m = bits(instruction, 17, 22) << 3, bits(instruction, 24, 28) << 4
        assert (m, n) == (128, 16)
        assert instruction & ~(0x3 << 4 | 0x7 << 7 | 0x7 << 10 | 0x3F << 17 | 0x1F << 24) == 0  # both K-major
        a, b = (
            bfloat16_of_nibbles(matrix_in_shared_memory(image["shared"], image[f"descriptor_{name}"], rows))
            for name, rows in (("a", m), ("b", n))
        )
        assert np.array_equal(a, hadamard.vectors(chunk)[:m])
        assert np.array_equal(from_bfloat16(b).T, RHT().matrix())


def bfloat16_of_nibbles(codes: Array) -> Array:
    """Rows of 16 bfloat16 patterns from their 64 nibbles, lowest first."""
    parts = codes.reshape(len(codes), 16, 4).astype(np.uint16)
    return (parts << np.array([0, 4, 8, 12], np.uint16)).sum(axis=-1).astype(np.uint16)


# ---- machine code ------------------------------------------------------------------------------------------


def builds() -> Iterator[Any]:
    """Every probe for the targets of continuous integration; one target each unless NVFP4_COMPILE_ALL is set."""
    for name in probes.names():
        mine = targets(probes.load(name), CI_TARGETS)
        assert mine
        for target in mine if os.environ.get("NVFP4_COMPILE_ALL") else mine[-1:]:
            yield pytest.param(name, target, id=f"{name}-{target}")


def nvcc_missing() -> str:
    try:
        toolchain.find_nvcc.cache_clear()
        toolchain.find_nvcc()
    except ProbeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing() or "nvcc is there")
@pytest.mark.parametrize(("name", "target"), list(builds()))
def test_the_machine_code_holds_the_instruction(name: str, target: str, tmp_path: Path) -> None:
    found = toolchain.instructions(probes.load(name), target, tmp_path)
    assert "not disassembled" in found or re.search(probes.load(name).instruction, found)
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


@pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing() or "nvcc is there")
def test_a_target_without_the_instruction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"cannot compile rs_e2m1.cu for sm_120a: .*"):
        toolchain.instructions(probes.load("rs-e2m1"), "sm_120a", tmp_path)
    assert not list(tmp_path.iterdir())
