"""Building the programs with nvcc for the GPU at hand, and running them.

nvcc is looked for in $CUDA_HOME/bin, $CUDA_PATH/bin, on the PATH and in /usr/local/cuda/bin.  A program is compiled
once for each combination of sources, compiler and target, kept in the user's cache folder, and run as a process of
its own: what crashes or hangs is that process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nvfp4hw import cache
from nvfp4hw.probes.base import Output, Probe, ProbeError, Progress
from nvfp4ref.container import counted

FOLDER = Path(__file__).parent
# No contraction and no flushing: the models in float32 are exact as they are written.
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-ftz=false")
COMPILE_LIMIT = 600.0


# ---- nvcc --------------------------------------------------------------------------------------------------


@functools.cache
def find_nvcc() -> Path:
    """nvcc; ProbeError that says what to install when there is none."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*map(str, homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    if found := shutil.which("nvcc", path=path):
        return Path(found)
    raise ProbeError("there is no nvcc: install the CUDA toolkit, 12.9 or newer, or set CUDA_HOME to it")


@functools.cache
def nvcc_version() -> str:
    """Release of nvcc, e.g. "13.0.88"."""
    text = _completed([str(find_nvcc()), "--version"], 60).stdout
    found = re.search(r"V(\d+(?:\.\d+)+)", text)
    return found[1] if found else "unknown"


def _completed(command: Sequence[str], limit: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{command[0]} did not end within {limit:g} s") from None
    except OSError as error:
        raise ProbeError(f"{command[0]} does not run: {error}") from None


def _target(architecture: str) -> str:
    number = architecture.removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def fingerprint(source: str) -> str:
    """SHA-256 over a program's source and every header beside it."""
    digest = hashlib.sha256()
    for path in (FOLDER / source, *sorted(FOLDER.glob("*.cuh"))):
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def compile_program(source: str, architecture: str, path: Path, *, cubin: bool = False) -> None:
    """Compile ``source`` to an executable or, with ``cubin``, to machine code alone; complete or not at all.

    Raises ProbeError with the compiler's first error.
    """
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as build:
        made = Path(build) / "out"
        command = [str(find_nvcc()), *FLAGS, _target(architecture), *(["-cubin"] if cubin else [])]
        done = _completed([*command, "-o", str(made), str(FOLDER / source)], COMPILE_LIMIT)
        if done.returncode or not made.is_file():
            lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()] or [
                "no message"
            ]
            first = next((line for line in lines if "error" in line.lower()), lines[0])
            raise ProbeError(f"nvcc {nvcc_version()} cannot compile {source} for {architecture}: {first}")
        os.replace(made, path)


def built(source: str, architecture: str) -> Path:
    """The program for a target, from the cache or compiled now."""
    key = f"{fingerprint(source)} {find_nvcc()} {nvcc_version()} {FLAGS} {architecture}"
    name = f"{Path(source).stem}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    path = (cache.user_folder() or cache.temporary_folder()) / (name + (".exe" if sys.platform == "win32" else ""))
    if not path.is_file():
        compile_program(source, architecture, path)
    return path


def find_disassembler() -> Path | None:
    """nvdisasm: beside nvcc, on the PATH, or of the wheel nvidia-cuda-nvdisasm."""
    path = os.pathsep.join([str(find_nvcc().parent), os.environ.get("PATH", "")])
    if found := shutil.which("nvdisasm", path=path):
        return Path(found)
    try:
        files = metadata.distribution("nvidia-cuda-nvdisasm").files or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.stem == "nvdisasm"), None)


def instructions(probe: Probe, architecture: str, folder: Path) -> str:
    """Compile a probe to machine code for a target and find its instruction there.

    Returns the first such instruction, or a sentence that there is no disassembler.  ProbeError when the program does
    not compile or lacks the instruction.
    """
    path = folder / f"{Path(probe.source).stem}-{architecture}.cubin"
    compile_program(probe.source, architecture, path, cubin=True)
    disassembler = find_disassembler()
    if disassembler is None:
        return "not disassembled: pip install nvidia-cuda-nvdisasm"
    done = _completed([str(disassembler), str(path)], COMPILE_LIMIT)
    if done.returncode:
        raise ProbeError(f"{disassembler} cannot read {path.name}{_last(done.stderr)}")
    for line in done.stdout.splitlines():
        if re.search(probe.instruction, line):
            return re.sub(r"/\*.*?\*/", "", line).strip()
    raise ProbeError(f"{path.name} holds no instruction {probe.instruction!r}")


# ---- the device --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """The first CUDA device: its name, its target without suffix (90 for sm_90), and the driver."""

    name: str
    number: int
    driver: str


# Asked in a process of its own: a driver that crashes or hangs takes nothing with it.
_ASK = """
import ctypes, json, sys
cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        sys.exit(f"{name} returned {status}")
value, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
name = ctypes.create_string_buffer(256)
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(value))
if value.value == 0:
    sys.exit("the driver sees no device")
device = ctypes.c_int()
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDeviceGetName", name, 256, device)
call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
call("cuDriverGetVersion", ctypes.byref(value))
print(json.dumps({"name": name.value.decode(errors="replace"), "number": 10 * major.value + minor.value,
                  "driver": f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"}))
"""


@functools.cache
def find_device() -> Device:
    """The device that CUDA_VISIBLE_DEVICES leaves first; ProbeError when there is none or the driver fails."""
    done = _completed([sys.executable, "-c", _ASK], 60)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ProbeError(f"there is no CUDA device: {last}")
    device = Device(**json.loads(done.stdout))
    package = _driver_package()
    return Device(device.name, device.number, f"{package} ({device.driver})" if package else device.driver)


def _driver_package() -> str:
    """The driver's own version, e.g. "580.159.04", where the system tells."""
    try:
        found = re.search(r"\b\d{3,}(?:\.\d+)+", Path("/proc/driver/nvidia/version").read_text("utf-8"))
    except OSError:
        return ""
    return found[0] if found else ""


def target_for(probe: Probe, device: Device) -> str:
    """The probe's target for a device, "" when it has none."""
    return next((a for a in probe.architectures if re.fullmatch(rf"sm_{device.number}[af]?", a)), "")


class Toolchain:
    """Programs compiled by nvcc and run on the GPU of this machine."""

    def availability(self, probe: Probe) -> str | None:
        try:
            device = find_device()
            if not target_for(probe, device):
                return f"{device.name} is sm_{device.number}; this needs {', '.join(probe.architectures)}"
            find_nvcc()
        except ProbeError as error:
            return str(error)
        return None

    def version(self) -> str:
        try:
            device = find_device()
            return f"nvcc {nvcc_version()}, driver {device.driver}, {device.name} (sm_{device.number})"
        except ProbeError:
            return ""

    def launch(self, probe: Probe, inputs: Mapping[str, bytes], progress: Progress | None) -> Output:
        device = find_device()
        architecture = target_for(probe, device)
        if progress is not None:
            progress(f"{probe.name}: compiling for {architecture}", 0, 2)
        program = built(probe.source, architecture)
        if progress is not None:
            progress(f"{probe.name}: running", 1, 2)
        environment = {
            "device": f"{device.name} ({architecture})",
            "architecture": architecture,
            "driver": device.driver,
            "nvcc": nvcc_version(),
            "source": fingerprint(probe.source),
        }
        output = execute([str(program)], inputs, probe.limit, environment)
        if progress is not None:
            progress(f"{probe.name}: running", 2, 2)
        return output


# ---- running a program -------------------------------------------------------------------------------------


def execute(
    command: Sequence[str],
    inputs: Mapping[str, bytes],
    limit: float,
    environment: Mapping[str, Any],
    options: Sequence[str] = (),
) -> Output:
    """Run ``command FOLDER limit=… OPTIONS`` in a folder with the inputs and read what it left.

    Raises ProbeError when it does not start, is stopped by a signal, outlasts ``limit`` seconds, ends with another
    status than 0 and 1, or leaves no verdict or files of other sizes than it said.
    """
    with tempfile.TemporaryDirectory(prefix="nvfp4-probe-") as folder:
        for name, data in inputs.items():
            (Path(folder) / name).write_bytes(data)
        start = time.monotonic()
        status, text, errors = _watched([*command, folder, f"limit={int(limit) + 5}", *options], limit)
        seconds = time.monotonic() - start
        if status < 0:
            raise ProbeError(f"the probe's program was stopped by {_signal_name(-status)}{_last(errors)}")
        if status not in (0, 1):
            raise ProbeError(f"the probe's program ended with status {status}{_last(errors)}")
        lines = _parsed(text)
        files = {name: _file(Path(folder) / name, size) for name, size in _files(lines)}
    output = Output(lines, files, {**environment, "seconds": round(seconds, 3), "output": text})
    verdict = output.one("verdict")
    if verdict not in ("PASS", "FAIL") or (verdict == "PASS") != (status == 0):
        raise ProbeError(f"the probe's program said {verdict!r} and ended with status {status}")
    return output


def _watched(command: Sequence[str], limit: float) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; the whole process group is ended at the limit."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ProbeError(f"the probe's program does not start: {error}") from None
    try:
        text, errors = process.communicate(timeout=limit)
        return process.returncode, text, errors
    except subprocess.TimeoutExpired:
        raise ProbeError(f"the probe's program did not end within {limit:g} s") from None
    finally:
        if process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.communicate()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def _parsed(text: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, rest = line.strip().partition(" ")
        if key:
            lines.setdefault(key, []).append(rest.strip())
    return lines


def _files(lines: Mapping[str, list[str]]) -> list[tuple[str, int]]:
    found = []
    for line in lines.get("file", []):
        match = re.fullmatch(r"([A-Za-z0-9_.-]+) (\d+)", line)
        if match is None:
            raise ProbeError(f"the probe's program announced no readable file: {line!r}")
        found.append((match[1], int(match[2])))
    return found


def _file(path: Path, size: int) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        raise ProbeError(f"the probe's program left no file {path.name}") from None
    if len(data) != size:
        raise ProbeError(f"the probe's file {path.name} has {counted(len(data), 'byte')}; it announced {size}")
    return data
