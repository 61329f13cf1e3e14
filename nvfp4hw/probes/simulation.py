"""Programs that the oracle plays, with faults planted on request: probes without a GPU, for tests and rehearsals.

``python -c …`` of this module takes a probe's name, a fault and the folder, writes the files that the CUDA program
would write, says what it would say, and ends, or not, as the fault has it.  Everything else of a probe, from the
process and its time limit to the verdict, is then the real thing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nvfp4hw.probes import conversions, hadamard, mma, reciprocal, stochastic
from nvfp4hw.probes.base import Array, Output, Probe, Progress
from nvfp4hw.probes.runs import Encode, Runs, compare, dense_runs, float_runs, joined, write_runs
from nvfp4hw.probes.toolchain import execute
from nvfp4ref import e2m1, e4m3, tensorcore
from nvfp4ref import hadamard as transform
from nvfp4ref.fp32 import from_bfloat16

#: Faults of the program itself, for every probe.
PROGRAM_FAULTS = {
    "crash": "ends with a segmentation fault",
    "hang": "never ends",
    "garbage": "prints what no probe prints",
    "silent": "ends well without a verdict",
    "short-file": "writes half of its last file",
    "error": "ends with status 3 and a message",
    "lie": "says PASS about wrong outputs",
}
#: Faults of the hardware, by probe.
NEAREST_FAULTS = ("nan-zero", "minus-zero", "ties-away", "one-threshold", "second-operand")
STOCHASTIC_FAULTS = ("operands-reversed", "no-bit-reversal", "sticky", "nan-zero", "one-threshold")
HADAMARD_FAULTS = ("24-bits", "rounded-sum", "dropped-product")
MMA_FAULTS = (*mma.MODELS[1:], "dropped-product", "swapped-rows", "shifted-scales")
RECIPROCAL_FAULTS = ("two-ulp", "unpredicted")


def faults_of(probe: Probe) -> tuple[str, ...]:
    """Every fault that can be planted in a probe's program."""
    kinds: list[tuple[type[Probe], tuple[str, ...]]] = [
        (conversions.NearestProbe, NEAREST_FAULTS),
        (stochastic.StochasticProbe, STOCHASTIC_FAULTS),
        (hadamard.Hadamard, HADAMARD_FAULTS),
        (mma.MmaProbe, MMA_FAULTS),
        (reciprocal.Reciprocal, RECIPROCAL_FAULTS),
    ]
    return (*PROGRAM_FAULTS, *next(faults for kind, faults in kinds if isinstance(probe, kind)))


class Simulation:
    """A launcher whose programs are the oracle's own, each in a process as on a GPU.

    Args:
        fault: "" or one of :func:`faults_of` the probe.
        device: the name that the record gives; it always says "simulated".
        reason: not None: why the probe is not available here.
    """

    def __init__(self, fault: str = "", device: str = "Blackwell", reason: str | None = None) -> None:
        self.fault, self.device, self.reason = fault, device, reason

    def availability(self, probe: Probe) -> str | None:
        return self.reason

    def version(self) -> str:
        return f"simulated {self.device}"

    def launch(self, probe: Probe, inputs: Mapping[str, bytes], progress: Progress | None) -> Output:
        if self.fault and self.fault not in faults_of(probe):
            raise ValueError(f"fault {self.fault!r} of probe {probe.name} is not one of {', '.join(faults_of(probe))}")
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from nvfp4hw.probes.simulation import main; sys.exit(main())"
        environment = {"device": f"simulated {self.device}", "architecture": "simulated", "fault": self.fault}
        if progress is not None:
            progress(f"{probe.name}: simulating", 0, 1)
        return execute([sys.executable, "-c", code, probe.name, self.fault], inputs, probe.limit, environment)


# ---- the program -------------------------------------------------------------------------------------------

#: file -> contents, and lines to say before the verdict; how many outputs, how many of them wrong
Played = tuple[dict[str, bytes], list[str], int, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the program of a probe: NAME FAULT FOLDER [key=value …]."""
    from nvfp4hw import probes

    name, fault, folder = (sys.argv[1:] if arguments is None else arguments)[:3]
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while fault == "hang":
        time.sleep(1)
    if fault == "garbage":
        print("file ../../elsewhere 12\n\x00 compared all, it seems")
        return 0
    if fault == "error":
        print("cannot run: the sweep: an illegal memory access was encountered", file=sys.stderr)
        return 3
    probe = probes.load(name)
    planted = "" if fault in PROGRAM_FAULTS and fault != "lie" else fault
    if fault == "lie":
        planted = faults_of(probe)[len(PROGRAM_FAULTS)]
    files, lines, compared, different = _play(probe, planted)
    for file, data in files.items():
        last = file == list(files)[-1]
        (Path(folder) / file).write_bytes(data[: len(data) // 2] if fault == "short-file" and last else data)
        print(f"file {file} {len(data)}")
    if fault == "silent":
        return 0
    wrong = 0 if fault == "lie" else different
    print("\n".join([*lines, f"compared {compared}", f"different {wrong}", "verdict " + ("FAIL" if wrong else "PASS")]))
    return 1 if wrong else 0


def _play(probe: Probe, fault: str) -> Played:
    if isinstance(probe, conversions.NearestProbe):
        return _nearest(probe, fault)
    if isinstance(probe, stochastic.StochasticProbe):
        return _stochastic(probe, fault)
    if isinstance(probe, reciprocal.Reciprocal):
        return _reciprocal(fault)
    if isinstance(probe, hadamard.Hadamard):
        return _hadamard(fault)
    return _mma(fault)


def _swept(sweeps: Mapping[str, tuple[Runs, Runs]]) -> Played:
    """The sweeps of a program: file -> (found, expected)."""
    lines, compared, different = [], 0, 0
    for file, (found, expected) in sweeps.items():
        lines.append(f"sweep {file} {found.curves} {found.first} {found.count} {len(found.start)}")
        wrong, first = compare(found, expected, lambda curve, point: {"curve": curve, "point": f"0x{point:08X}"})
        lines += [f"counterexample {file} {one}" for one in first]
        compared, different = compared + found.curves * found.count, different + wrong
    return {file: write_runs(found) for file, (found, _) in sweeps.items()}, lines, compared, different


def _nearest(probe: conversions.NearestProbe, fault: str) -> Played:
    encode: Encode
    encode, last, sign = conversions.NEAREST[probe.form]
    curves = len(probe.curves)
    expected = conversions.expected_runs(probe.form, curves)
    if fault == "ties-away":
        encode = _away(probe.form)
    found = float_runs(encode, curves, last, sign)
    if fault == "nan-zero":
        found.code[(found.start == 0x7F800001) | (found.start == 0xFF800001)] = 0
        found = _canonical(found, {0x7F800001: 0})
    if fault == "minus-zero":
        found = _canonical(found, {0x80000000: 0, 0x80000001: sign})
    if fault == "one-threshold":
        found.start[5] += 1
    if fault == "second-operand":  # right by itself, wrong whenever it is the second operand
        found.code[found.curve == curves - 1] ^= sign
    return _swept({"runs.bin": (found, expected)})


def _canonical(runs: Runs, codes: Mapping[int, int]) -> Runs:
    """The runs with further stretches that begin at a point and have a code, on every curve."""
    every = np.arange(runs.curves)
    curve = np.concatenate([runs.curve, *(every for _ in codes)])
    start = np.concatenate([runs.start, *(np.full(runs.curves, point) for point in codes)])
    code = np.concatenate([runs.code, *(np.full(runs.curves, value) for value in codes.values())])
    # of two stretches that begin at one point the later one counts
    keys = curve.astype(np.int64) << 32 | start.astype(np.int64)
    last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
    return joined(curve[last], start[last], code[last], runs.curves, runs.first, runs.count)


def _away(form: str) -> Encode:
    def encode(curve: Array, bits: Array) -> Array:
        x = bits.view(np.float32)
        with np.errstate(invalid="ignore"):
            return e2m1.encode(x, "ties-away") if form == "e2m1" else e4m3.encode(x, "half-up")

    return encode


def _stochastic(probe: stochastic.StochasticProbe, fault: str) -> Played:
    sweeps = {}
    for file, (rule, over) in probe.sweeps.items():
        faulty = _FaultyRule(rule, fault)
        if over == "thresholds":
            expected = _known_thresholds(rule)
            found = _faulty_thresholds(rule, faulty) if fault and rule.last < 8 else expected
        else:
            expected = stochastic.expected_patterns(rule)
            found = _faulty_patterns(rule, faulty) if fault else expected
        if fault == "one-threshold" and over == "patterns":
            found.start[7] += 1
        sweeps[file] = (found, expected)
    return _swept(sweeps)


def _known_thresholds(rule: stochastic.Rule) -> Runs:
    """What the sweep over thresholds must find, by its construction: every curve is one run."""
    code, _, below = (index.reshape(-1) for index in np.indices((rule.last, 4, 2)))
    codes = (code + 1 - below) | (code & 1) * rule.sign
    every = np.arange(codes.size)
    return joined(every, np.zeros(codes.size), codes, codes.size, 0, stochastic.FIELDS)


def _faulty_patterns(rule: stochastic.Rule, faulty: _FaultyRule) -> Runs:
    def encode(curve: Array, bits: Array) -> Array:
        rows = np.arange(len(bits))
        x = np.zeros((len(bits), 4), np.float32)
        x.view(np.uint32)[rows, curve % 4] = bits
        return faulty.encode(x, stochastic.words()[curve // 4])[rows, curve % 4]

    return float_runs(encode, 4 * stochastic.WORDS, rule.last, rule.sign)


class _FaultyRule:
    """A rule's conversion with a fault."""

    def __init__(self, rule: stochastic.Rule, fault: str) -> None:
        self.rule, self.fault = rule, fault

    def encode(self, x: Array, random: Array) -> Array:
        x = x.copy()
        if self.fault == "operands-reversed":
            return self.rule.encode(x[:, ::-1].copy(), random)[:, ::-1]
        if self.fault == "sticky":  # lost bits round the kept ones up
            bits = x.view(np.uint32)
            x = np.where(np.isfinite(x), (bits + np.uint32(15)) & np.uint32(0xFFFFFFF0), bits).view(np.float32)
        codes = self.rule.encode(x, random)
        if self.fault == "no-bit-reversal":
            straight = self.rule.encode(x[:, [1, 0, 3, 2]].copy(), random)
            codes[:, 1::2] = straight[:, 0::2]
        if self.fault == "nan-zero":
            codes[np.isnan(x)] = 0
        return codes


def _faulty_thresholds(rule: stochastic.Rule, faulty: _FaultyRule) -> Runs:
    codes = np.empty((rule.last, 4, 2, stochastic.FIELDS), np.uint8)
    for code in range(rule.last):
        for below in (0, 1):
            bits, random = stochastic.threshold_arguments(rule, code, below)
            codes[code, :, below] = faulty.encode(bits.view(np.float32), random).T
    return dense_runs(codes.reshape(-1, stochastic.FIELDS))


def _reciprocal(fault: str) -> Played:
    table = np.zeros(reciprocal.MANTISSAS, np.int8)
    zero = np.zeros(1, np.uint32)
    expected = Runs(zero.astype(np.uint16), zero, zero.astype(np.uint16), 1)
    found = expected
    if fault == "two-ulp":
        table[12345] = 2
    if fault == "unpredicted":
        found = _canonical(expected, {0x7F000000: 1, 0x7F000001: 0})
    files, lines, compared, different = _swept({"runs.bin": (found, expected)})
    beyond = int((np.abs(table) > 1).sum())
    return {"table.bin": table.tobytes(), **files}, [*lines, f"beyond {beyond}"], compared, different + beyond


def _hadamard(fault: str) -> Played:
    chunks = len(hadamard.KINDS)
    digests, samples, different = [], [], 0
    for chunk in range(chunks):
        ours = hadamard.expected(chunk)
        x = hadamard.vectors(chunk)
        total = _faulty_sums(x, fault) if fault else hadamard.sums(x)
        digests.append(hadamard.digest(total))
        samples.append(total[: hadamard.SAMPLED].view(np.uint32))
        different += digests[-1] != ours[0]
    files = {
        "digests.bin": np.array(digests, "<u8").tobytes(),
        "samples.bin": np.stack(samples).astype("<u4").tobytes(),
    }
    return files, [f"chunks {chunks} {chunks}", "rounded 0"], chunks * hadamard.CHUNK, different


def _faulty_sums(x: Array, fault: str) -> Array:
    if fault == "24-bits":
        transform.FRACTION_BITS = 24  # this process plays one fault and ends
        return hadamard.sums(x)
    if fault == "dropped-product":
        return hadamard.sums(np.where(np.arange(16) == 7, 0, x).astype(np.uint16))
    with np.errstate(all="ignore"):
        exact = from_bfloat16(x).astype(np.float64) @ transform.RHT().matrix().astype(np.float64)
        return exact.astype(np.float32)


def _mma(fault: str) -> Played:
    found = mma.predicted(fault if fault in mma.MODELS else "blackwell").copy()
    if fault == "swapped-rows":
        found = found.reshape(-1, mma.ROWS // 2, 2, mma.COLUMNS)[:, :, ::-1].reshape(found.shape)
    if fault in ("dropped-product", "shifted-scales"):
        everything = mma.tiles()
        a, sa = everything.a.copy(), everything.sa
        if fault == "dropped-product":
            a[..., 5] = 0
        else:
            sa = np.roll(sa, 1, axis=-1)
        for t in range(mma.LAYOUT_TILES):
            found[t] = _words_of(a[t], everything.b[t], sa[t], everything.sb[t], everything.c[t])
    different = int((found != mma.predicted("blackwell")).sum())
    return {"words.bin": found.astype("<u4").tobytes()}, [f"tiles {len(found)}"], found.size, different


def _words_of(a: Array, b: Array, sa: Array, sb: Array, c: Array) -> Array:
    m, n = (index.reshape(-1) for index in np.indices(c.shape))
    d = tensorcore.mma_words(a[m], b[n], c[m, n].view(np.float32), sa[m], sb[n])
    return d.view(np.uint32).reshape(c.shape)
