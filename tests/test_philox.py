"""Philox4x32 against published answers, a scalar twin, and three libraries that give its raw words."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from nvfp4ref import philox
from nvfp4ref.philox import calls, philox4x32

Words = tuple[int, ...]
ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)

#: rounds, (counter, key), answer: the known answers that the authors of Random123 publish
KNOWN_ANSWERS = [
    (7, (0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 6, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def slow(counter: Words, key: Words, rounds: int = 10) -> Words:
    """One call in plain integers: the round function as Salmon and others define it (2011, section 3.3)."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * x0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def slow_call(seed: int, offset: int, sequence: int, call: int, rounds: int = 10) -> Words:
    """PHILOX-COUNTER as one 128-bit addition."""
    counter = ((sequence << 64) + offset + call) % 2**128
    return slow(
        tuple(counter >> shift & ONES for shift in (0, 32, 64, 96)), (seed & ONES, seed >> 32), rounds
    )


@pytest.mark.parametrize(("rounds", "given", "answer"), KNOWN_ANSWERS)
def test_known_answers(rounds: int, given: Words, answer: Words) -> None:
    """PHILOX-ROUNDS"""
    found = philox4x32(given[:4], given[4:], rounds)
    assert found.dtype == np.uint32 and tuple(found.tolist()) == answer
    assert slow(given[:4], given[4:], rounds) == answer


@pytest.mark.parametrize("rounds", [1, 2, 6, 7, 10, 32])
def test_every_number_of_rounds_against_the_scalar_twin(rounds: int) -> None:
    """PHILOX-ROUNDS"""
    rng = np.random.default_rng(rounds)
    counters = rng.integers(0, 2**32, (50, 4), np.uint64).astype(np.uint32)
    counters[rng.random(counters.shape) < 0.2] = ONES
    counters[rng.random(counters.shape) < 0.2] = 0
    for key in ((0, 0), (ONES, 0), tuple(rng.integers(0, 2**32, 2).tolist())):
        expected = [slow(tuple(counter), key, rounds) for counter in counters.tolist()]
        np.testing.assert_array_equal(philox4x32(counters, key, rounds), np.array(expected, np.uint32))


def test_any_shape_of_counters() -> None:
    counters = np.arange(2 * 3 * 4, dtype=np.uint32).reshape(2, 3, 4)
    found = philox4x32(counters, (5, 6))
    assert found.shape == (2, 3, 4)
    np.testing.assert_array_equal(found[1, 2], philox4x32(counters[1, 2], (5, 6)))
    assert philox4x32(counters[:0], (5, 6)).shape == (0, 3, 4)
    np.testing.assert_array_equal(counters.ravel(), np.arange(24))


# ---- the counter: offset + call, sequence ------------------------------------------------------------------

TOP = 2**64 - 1
PLACES = [
    (0, 0, 0, 0),
    (1234, 0, 127, 31),
    (0x123456789ABCDEF0, 0xFFFFFFFF, 5, 1),  # the carry inside the low half
    (7, 2**63, 2**40, 2**63 - 1),
    (7, TOP, 0, 0),
    (7, TOP, 0, 1),  # the carry into the sequence
    (TOP, TOP - 3, 0xFFFFFFFF, 4),  # and on, past its low word
    (TOP, TOP, TOP, TOP),  # and out of the counter
]


@pytest.mark.parametrize(("seed", "offset", "sequence", "call"), PLACES)
def test_counter_is_a_128_bit_sum(seed: int, offset: int, sequence: int, call: int) -> None:
    """PHILOX-COUNTER"""
    found = calls(seed, offset, np.uint64([sequence]), np.uint64([call]))
    assert tuple(found[0].tolist()) == slow_call(seed, offset, sequence, call)


def test_an_offset_is_a_later_call() -> None:
    """PHILOX-COUNTER: offset n and call 0 are offset 0 and call n, so an offset counts 128-bit blocks."""
    sequence, call = np.uint64([3]), np.arange(100, dtype=np.uint64)
    np.testing.assert_array_equal(calls(9, 60, sequence, call[:40]), calls(9, 0, sequence, call[60:]))


def test_sequences_and_calls_broadcast() -> None:
    sequence, call = np.arange(3, dtype=np.uint64)[:, None], np.arange(5, dtype=np.uint64)[None]
    found = calls(1, 2, sequence, call)
    assert found.shape == (3, 5, 4)
    for s, c in np.ndindex(3, 5):
        assert tuple(found[s, c].tolist()) == slow_call(1, 2, s, c)


def test_pieces_do_not_show() -> None:
    count = 2 * philox.CHUNK + 5
    whole = calls(3, TOP - philox.CHUNK, np.uint64([8]), np.arange(count, dtype=np.uint64))
    for at in (0, philox.CHUNK - 1, philox.CHUNK, philox.CHUNK + 1, 2 * philox.CHUNK, count - 1):
        assert tuple(whole[at].tolist()) == slow_call(3, TOP - philox.CHUNK, 8, at)


def test_numpy_integers_are_integers() -> None:
    ones = np.uint64([1])
    np.testing.assert_array_equal(calls(np.int32(5), np.uint64(6), ones, ones), calls(5, 6, ones, ones))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"seed": -1}, ValueError, "seed is 64 bits wide, 0 … 2.64−1; got -1"),
        ({"seed": 2**64}, ValueError, "seed is 64 bits wide, 0 … 2.64−1; got 18446744073709551616"),
        ({"offset": 2**64}, ValueError, "offset is 64 bits wide"),
        ({"offset": -1024}, ValueError, "offset is 64 bits wide, 0 … 2.64−1; got -1024"),
        ({"seed": 1.0}, TypeError, "seed is an integer; got float"),
        ({"seed": "7"}, TypeError, "seed is an integer; got str"),
        ({"offset": True}, TypeError, "offset is an integer; got bool"),
        ({"offset": None}, TypeError, "offset is an integer; got NoneType"),
        ({"rounds": 0}, ValueError, "rounds is an integer from 1 to 32 .*got 0"),
        ({"rounds": 33}, ValueError, "got 33"),
        ({"rounds": 7.0}, ValueError, "got 7.0"),
    ],
)
def test_a_bad_state_is_refused_in_one_sentence(
    given: dict[str, object], error: type[Exception], says: str
) -> None:
    arguments: dict[str, object] = {"seed": 1, "offset": 2, "rounds": 10} | given
    with pytest.raises(error, match=says) as raised:
        calls(sequence=np.uint64([0]), call=np.uint64([0]), **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


# ---- other implementations of the raw words ----------------------------------------------------------------

COUNT = 250_000  # calls, four words each
STATES = [(0, 0, 0), (0x123456789ABCDEF0, 2**64 - 1000, 0xFFFFFFFF), (2**64 - 1, 2**32 - 1000, 2**63 + 5)]


@pytest.mark.parametrize(("seed", "offset"), [state[:2] for state in STATES])
def test_against_xla(seed: int, offset: int) -> None:
    """XLA's Philox numbers its calls from a 64-bit state; the other half of its counter is its key again."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        state = jax.numpy.array([seed, offset], jax.numpy.uint64)
        algorithm = jax.lax.RandomAlgorithm.RNG_PHILOX
        _, theirs = jax.lax.rng_bit_generator(state, (COUNT, 4), jax.numpy.uint32, algorithm=algorithm)
    mine = calls(seed, offset, np.uint64([seed]), np.arange(COUNT, dtype=np.uint64))
    np.testing.assert_array_equal(mine, np.asarray(theirs))


def _include(distribution: str, header: str) -> Path | None:
    """The include folder of an installed wheel that holds the header."""
    try:
        files = metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        return None
    found = next((file for file in files if file.as_posix().endswith(f"include/{header}")), None)
    return None if found is None else Path(str(found.locate())).parents[header.count("/")]


def _pytorch_header() -> Path | None:
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent / "include" if spec and spec.origin else None
    return folder if folder and (folder / "ATen/core/PhiloxRNGEngine.h").is_file() else None


SOURCES = {
    # an offset of this engine counts 128-bit blocks, as Transformer Engine's does
    "pytorch": """
        #include <ATen/core/PhiloxRNGEngine.h>
        extern "C" void words(uint64_t seed, uint64_t offset, uint64_t sequence, uint32_t* out, long n) {
            at::philox_engine engine(seed, sequence, offset);
            for (long i = 0; i < 4 * n; ++i) out[i] = engine();
        }
        extern "C" void first(uint64_t seed, uint64_t offset, uint64_t sequence, uint32_t* out, int rounds) {
            at::philox_engine engine(seed, sequence, offset);
            for (int i = 0; i < 4; ++i) out[i] = engine(rounds);
        }""",
    # the header is device code; what follows is what a host compiler lacks of CUDA
    "curand": """
        #include <cstdint>
        struct uint2 { unsigned x, y; };
        struct uint4 { unsigned x, y, z, w; };
        #define QUALIFIERS static inline
        #include <curand_philox4x32_x.h>
        extern "C" void words(uint64_t seed, uint64_t offset, uint64_t sequence, uint32_t* out, long n) {
            curandStatePhilox4_32_10_t state = {};
            uint2 key = {unsigned(seed), unsigned(seed >> 32)};
            Philox_State_Incr_hi(&state, sequence);
            Philox_State_Incr(&state, offset);
            for (long i = 0; i < n; ++i, out += 4, Philox_State_Incr(&state)) {
                uint4 w = curand_Philox4x32_10(state.ctr, key);
                out[0] = w.x, out[1] = w.y, out[2] = w.z, out[3] = w.w;
            }
        }""",
}
HEADERS = {"pytorch": _pytorch_header(), "curand": _include("nvidia-curand", "curand_philox4x32_x.h")}


@pytest.fixture(scope="module", params=sorted(SOURCES))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, compiler = HEADERS[request.param], shutil.which("g++")
    if folder is None or compiler is None:
        pytest.skip(f"needs the headers of {request.param} and g++")
    place = tmp_path_factory.mktemp("philox")
    (place / "nv").mkdir()
    (place / "nv" / "target").write_text("#define NV_IF_ELSE_TARGET(condition, host, device) host\n")
    (place / "words.cpp").write_text(SOURCES[request.param])
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC", f"-I{folder}", f"-I{place}"]
    subprocess.run([compiler, *flags, "-o", str(place / "words.so"), str(place / "words.cpp")], check=True)
    return ctypes.CDLL(str(place / "words.so"))


def _state(seed: int, offset: int, sequence: int) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(value) for value in (seed, offset, sequence)]


@pytest.mark.parametrize(("seed", "offset", "sequence"), STATES)
def test_against_compiled_engines(library: ctypes.CDLL, seed: int, offset: int, sequence: int) -> None:
    """PHILOX-COUNTER, PHILOX-ROUNDS: a million words of each, over the carries of both halves."""
    theirs = np.empty((COUNT, 4), np.uint32)
    pointer = ctypes.c_void_p(theirs.ctypes.data)
    library.words(*_state(seed, offset, sequence), pointer, ctypes.c_long(COUNT))
    mine = calls(seed, offset, np.uint64([sequence]), np.arange(COUNT, dtype=np.uint64))
    np.testing.assert_array_equal(mine, theirs)


def test_other_round_counts_against_pytorch(library: ctypes.CDLL) -> None:
    """PHILOX-ROUNDS"""
    if not hasattr(library, "first"):
        pytest.skip("cuRAND has ten rounds only")
    for rounds in (1, 3, 7, 10, 20):
        theirs = np.empty(4, np.uint32)
        library.first(*_state(77, 3, 12), ctypes.c_void_p(theirs.ctypes.data), ctypes.c_int(rounds))
        mine = calls(77, 3, np.uint64([12]), np.uint64([0]), rounds)[0]
        np.testing.assert_array_equal(mine, theirs)
