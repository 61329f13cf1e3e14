"""The ``nvfp4`` command.

Exit codes: 0 conforms, done; 1 differs; 2 cannot be read, judged or done, with one sentence on stderr and
nothing written; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

import nvfp4ref as nv
from conformance import report as reports
from conformance import study_command
from conformance.capture import command as capture
from conformance.compare import CONFORMS, NOT_JUDGED, Report, check
from conformance.explain import diff, explain
from conformance.terminal import add_command, complain, progress, refuse_unwritable
from conformance.vectors import command as vectors_command
from nvfp4ref.container import agreed, counted, save_tensor
from nvfp4ref.dump import Dump, from_tensor, iter_dumps, load_tensor, save_dump
from nvfp4ref.streams import NAMES, dispatch

_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


_PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it; Windows has no such signal
_INTERRUPTED = 130  # 128 + SIGINT


class _Refused(Exception):
    """A request that cannot be met; the message is the sentence for stderr."""


# ---- quantize, dequantize ----------------------------------------------------------------------------------


def _quantize(options: argparse.Namespace) -> int:
    _refuse_contradictions(options)
    arithmetic = nv.arithmetic(options.arithmetic or "te")
    if options.row_scaled:
        arithmetic = nv.arithmetic(arithmetic, row_scaled=True)
    columnwise = options.columnwise or options.both
    x = load_tensor(options.input, options.dtype, options.name)
    if columnwise and x.ndim != 2:
        raise _Refused(f"the columnwise output is of a matrix transposed; {options.input} has shape {x.shape}")
    how: dict[str, Any] = {"block": options.block, "arithmetic": arithmetic, "threads": options.threads}
    if options.amax is not None:
        how["amax"] = np.float32(options.amax)
    meta: dict[str, Any] = {"rht_t": options.rht, "producer": {"name": "nvfp4ref", "version": nv.__version__}}
    if options.stochastic:
        how["rounding"] = meta["rounding"] = "stochastic"
        meta |= _generators(options, x)
    rht = nv.RHT() if options.rht else None
    rowwise = None if options.columnwise else nv.quantize(x, rbits=meta.get("rng"), **how)
    transposed = nv.quantize(x, axis=0, rht=rht, rbits=meta.get("rng_t"), **how) if columnwise else None
    save_dump(options.output, from_tensor(rowwise, x, columnwise=transposed, **meta))
    return 0


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Options that do not go together, before any file is read."""
    given = [f"--{name}" for name in ("seed", "offset", "kernel") if getattr(options, name) is not None]
    if options.rht and not (options.columnwise or options.both):
        raise _Refused("--rht applies to the columnwise output: add --columnwise or --both")
    if options.row_scaled and options.amax is not None:
        raise _Refused("--amax is one value, and --row-scaled needs one a row: leave one of them out")
    if options.stochastic and options.seed is None:
        raise _Refused("--stochastic needs --seed: there is no hidden randomness")
    if given and not options.stochastic:
        belong, them = agreed(len(given), "belongs", "belong"), agreed(len(given), given[0], "them")
        raise _Refused(f"{' and '.join(given)} {belong} to --stochastic: add it, or leave {them} out")


def _generators(options: argparse.Namespace, x: Any) -> dict[str, nv.Philox]:
    """The generator state of each direction, as Transformer Engine's PyTorch side hands it to its kernels.

    The fused kernels make both directions in one launch.  The unfused transform is a launch of its own: its
    state is drawn second, 1024 calls on.
    """
    kernel, offset = options.kernel or "auto", options.offset or 0
    if options.rht and kernel == "auto":
        kernel = dispatch(x.shape, 0, dtype=x.dtype.name, block=options.block, rht=True)
    if kernel != "unfused-rht":
        philox = nv.Philox(options.seed, offset, kernel, both=options.both)
        return {"rng": philox, "rng_t": philox}
    first = dispatch(x.shape, -1, dtype=x.dtype.name, block=options.block)
    second = offset + (1024 if options.both else 0)
    return {
        "rng": nv.Philox(options.seed, offset, first),
        "rng_t": nv.Philox(options.seed, second, "unfused-rht"),
    }


def _dequantize(options: argparse.Namespace) -> int:
    dumps = dict(iter_dumps(options.dump))
    if len(dumps) != 1:
        raise _Refused(f"{options.dump} holds {len(dumps)} tensors, and dequantize takes one: {', '.join(dumps)}")
    (dump,) = dumps.values()
    if dump.packed is None and dump.packed_t is None:
        raise _Refused(f"{options.dump} holds a GEMM, not a quantized tensor")
    q = dump.rowwise(options.arithmetic) if dump.packed is not None else dump.columnwise(options.arithmetic)
    save_tensor(options.output, nv.dequantize(q, _DTYPES[options.dtype or "float32"]))
    return 0


# ---- check, explain, diff ----------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    if options.arithmetic is not None:
        nv.arithmetic(options.arithmetic)  # refuse an unknown name once, before any dump is read
    checks = reports.Checks(options.arithmetic) if options.html else None
    if options.html:
        reports.require_html(options.html)
    found = [one for path in options.dumps for one in _checked(path, options, checks)]
    if options.json:
        objects = [one.to_json() for one in found]
        print(json.dumps(objects[0] if len(objects) == 1 else {"dumps": objects}, indent=1))
    if checks is not None:
        reports.write_html(options.html, checks)
    return max(one.exit_code for one in found)


def _checked(path: str, options: argparse.Namespace, checks: reports.Checks | None) -> Iterator[Report]:
    """Reports of every tensor in a file, printed as they come; why, when the file cannot be read."""
    try:
        for name, dump in iter_dumps(path):
            one = check(dump, options.arithmetic)
            if checks is not None:
                checks.add(path, name, one, dump)
            label = f"{path}: {name}" if name else path
            if one.outputs and not options.json:
                print(f"{label}: {one}", flush=True)
            if one.verdict == NOT_JUDGED:
                complain(f"{label}: {one.error}")
            if one.verdict == CONFORMS and options.undecided:
                print(f"{label}: {_undecided(dump, options)}", file=sys.stderr if options.json else None, flush=True)
            if options.suggest_input:
                if dump.d is None and (one.ambiguous or one.verdict == CONFORMS):
                    _suggest(dump, one, options)
                else:
                    complain(f"{label}: no two explanations fit, so {options.suggest_input} was not written")
            yield one
    except ValueError as error:
        complain(str(error))
        unread = Report(NOT_JUDGED, error=str(error), arithmetic=options.arithmetic or "te")
        if checks is not None:
            checks.add(path, "", unread)
        yield unread


def _undecided(dump: Dump, options: argparse.Namespace) -> str:
    """What a dump that conforms cannot exclude, in a sentence."""
    from conformance.undecided import undecided

    if dump.d is not None:
        return "a GEMM: what it cannot exclude is not asked"
    hidden = undecided(dump, options.arithmetic)
    if not hidden:
        return "every known deviation would have shown on this input"
    return (
        f"{counted(len(hidden), 'known deviation')} would have given the same bytes on this input: {', '.join(hidden)}"
    )


def _suggest(dump: Dump, found: Report, options: argparse.Namespace) -> None:
    """Write an input on which explanations of this dump differ, or deviations show, and say what it separates."""
    from conformance.diagnose import diagnosis
    from conformance.suggest import suggest_input
    from conformance.undecided import revealing

    if found.verdict == CONFORMS:
        save_tensor(options.suggest_input, revealing(dump))
        complain(f"{options.suggest_input}: quantize this and check the dump of it; known deviations show on it")
        return
    suggestion = suggest_input(dump, diagnosis(dump, options.arithmetic))
    if suggestion is None:
        complain("no input was found that tells the explanations apart")
        return
    save_tensor(options.suggest_input, suggestion.x)
    print(f"nvfp4: {options.suggest_input}: {suggestion}", file=sys.stderr)


def _lint(options: argparse.Namespace) -> int:
    from conformance.lint import main_lint

    return main_lint(options)


def _explain(options: argparse.Namespace) -> int:
    print(explain(_one_dump(options.dump), options.row, options.column, options.columnwise, options.arithmetic))
    return 0


def _diff(options: argparse.Namespace) -> int:
    found = diff(_one_dump(options.a), _one_dump(options.b), options.arithmetic)
    print(json.dumps(found.to_json(), indent=1) if options.json else found)
    return found.exit_code


def _one_dump(path: str) -> Dump:
    dumps = dict(iter_dumps(path))
    if len(dumps) != 1:
        raise _Refused(f"{path} holds {len(dumps)} tensors, and this command takes one: {', '.join(dumps)}")
    return next(iter(dumps.values()))


# ---- conformance -------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from conformance import run

    for path in filter(None, (options.json, options.junit)):
        refuse_unwritable(path)
    seen = reports.Seen() if options.html else None
    if options.html:
        reports.require_html(options.html)
    result = run.run(options.suite, options.backend, progress(), seen)
    print(reports.as_text(result))
    if options.json:
        reports.write_json(options.json, reports.as_json(result))
    if options.junit:
        reports.write_text(options.junit, reports.as_junit(result))
    if options.html:
        reports.write_html(options.html, result, seen)
    return result.exit_code


def _backends(options: argparse.Namespace) -> int:
    from conformance import run

    found = run.describe()
    if options.json:
        print(json.dumps({"backends": found}, indent=1))
        return 0
    width = max(len(one["name"]) for one in found)
    for one in found:
        state = f"available: {one['version']}" if one["available"] else f"not available: {one['reason']}"
        print(f"{one['name']:<{width}}  {state}")
        if one["preset"]:
            print(f"{'':<{width}}  preset {one['preset']}; {' '.join(one['features'])}")
    return 0


# ---- the command line --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse with one sentence for an error; usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see {self.prog} --help")
        raise SystemExit(2)


def _block(text: str) -> tuple[int, int]:
    try:
        return {"1x16": (1, 16), "16x16": (16, 16)}[text]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is no block shape, expected 1x16 or 16x16") from None


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no index, expected 0 or more")
    return int(text)


def _uint64(text: str) -> int:
    try:
        value = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if not 0 <= value < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text} is outside 64 bits")
    return value


def _amax(text: str) -> float:
    """The float32 nearest to a decimal; inf, nan and negative numbers too, for a kernel takes what it is given."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    with np.errstate(over="ignore"):
        single = float(np.float32(value))
    if math.isinf(single) and not math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text} is above the largest float32, 3.4028235e38")
    return single


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nvfp4",
        description="What a correct NVFP4 quantizer must produce, bit for bit.",
        epilog="A dump is one file with a quantizer's input and output: docs/dumps.md says what is in it. "
        "nvfp4 COMMAND --help says more of a command; 2 is the exit code of what cannot be done.",
    )
    parser.add_argument("--version", action="version", version=f"nvfp4ref {nv.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_quantize(commands)
    _add_checks(commands)
    _add_conformance(commands)
    vectors_command.add(commands)
    study_command.add(commands)
    return parser


_ARITHMETIC = "a preset; default: what the dump says, else te"


def _add_quantize(commands: Any) -> None:
    quantize = add_command(commands, "quantize", "quantize a tensor to a dump")
    quantize.add_argument("input", metavar="IN", help="the input: .npy, .npz or .safetensors")
    quantize.add_argument("--name", metavar="NAME", help="which array of a file that holds several")
    quantize.add_argument("-o", "--output", metavar="OUT", required=True, help="the dump: .npz or .safetensors")
    quantize.add_argument(
        "--block", type=_block, default=(1, 16), metavar="1x16|16x16", help="shape of a block; default 1x16"
    )
    direction = quantize.add_mutually_exclusive_group()
    direction.add_argument("--columnwise", action="store_true", help="quantize the transpose only")
    direction.add_argument("--both", action="store_true", help="quantize x and its transpose")
    quantize.add_argument("--rht", action="store_true", help="random Hadamard transform of the columnwise output")
    quantize.add_argument("--stochastic", action="store_true", help="stochastic rounding; needs --seed")
    quantize.add_argument("--seed", type=_uint64, metavar="S", help="seed of the generator, 64 bits")
    quantize.add_argument("--offset", type=_uint64, metavar="O", help="its offset, in calls of 128 bits; default 0")
    quantize.add_argument(
        "--kernel", choices=NAMES, metavar="K", help=f"whose random words: {', '.join(NAMES)}; default auto"
    )
    quantize.add_argument("--amax", type=_amax, metavar="A", help="the tensor's amax, in place of max(abs(x))")
    quantize.add_argument("--row-scaled", action="store_true", help="one global scale a row")
    quantize.add_argument(
        "--dtype", choices=list(_DTYPES), help="type to read the input as; uint16 with bfloat16 is bit patterns"
    )
    quantize.add_argument("--arithmetic", metavar="NAME", help=f"one of {', '.join(nv.PRESETS)}; default te")
    quantize.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads; default 1")
    quantize.set_defaults(run=_quantize)

    dequantize = add_command(commands, "dequantize", "write the values of a dump")
    dequantize.add_argument("dump", metavar="DUMP", help=".npz or .safetensors with one quantized tensor")
    dequantize.add_argument("-o", "--output", metavar="OUT", required=True, help="values: .npy, .npz or .safetensors")
    dequantize.add_argument("--dtype", choices=list(_DTYPES), help="of the values; default float32")
    dequantize.add_argument("--arithmetic", metavar="NAME", help=_ARITHMETIC)
    dequantize.set_defaults(run=_dequantize)


def _add_checks(commands: Any) -> None:
    one = add_command(commands, "check", "is a dump what the arithmetic says; exit 0 yes, 1 no, 2 not judged")
    one.add_argument("dumps", metavar="DUMP", nargs="+", help=".npz or .safetensors")
    one.add_argument("--arithmetic", metavar="NAME", help=_ARITHMETIC)
    one.add_argument("--json", action="store_true", help="one JSON object on stdout")
    one.add_argument("--html", metavar="FILE", help="write a page with what differs, where and why")
    one.add_argument(
        "--suggest-input",
        metavar="FILE",
        help="write an input on which the explanations that fit differ, or known deviations show where none is needed",
    )
    one.add_argument(
        "--undecided", action="store_true", help="of a dump that conforms, say which deviations its input would hide"
    )
    one.set_defaults(run=_check)

    lint = add_command(
        commands, "lint", "faults of a checkpoint that show without its input; exit 0 none, 1 some, 2 not judged"
    )
    lint.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help=".safetensors, a folder of them, or an index")
    lint.add_argument("--original", metavar="PATH", help="the weights before quantization, under the same names")
    lint.add_argument("--json", action="store_true", help="one JSON object on stdout")
    lint.set_defaults(run=_lint)

    element = add_command(commands, "explain", "every intermediate of one element, expected beside found")
    element.add_argument("dump", metavar="DUMP", help=".npz or .safetensors with one quantized tensor")
    element.add_argument("row", metavar="ROW", type=_index, help="of the element, from 0")
    element.add_argument("column", metavar="COL", type=_index, help="of the element, from 0")
    element.add_argument(
        "--columnwise",
        action="store_true",
        help="of the columnwise output; ROW and COL are then those of the transpose",
    )
    element.add_argument("--arithmetic", metavar="NAME", help=_ARITHMETIC)
    element.set_defaults(run=_explain)

    two = add_command(commands, "diff", "what separates two dumps of one tensor; exit 0 nothing, 1 something")
    two.add_argument("a", metavar="A", help="a dump")
    two.add_argument("b", metavar="B", help="another dump of the same tensor")
    two.add_argument("--arithmetic", metavar="NAME", help="judge both by this one")
    two.add_argument("--json", action="store_true", help="one JSON object on stdout")
    two.set_defaults(run=_diff)


def _add_conformance(commands: Any) -> None:
    conformance = add_command(commands, "conformance", "run real quantizers against the oracle")
    actions = conformance.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    suite = add_command(
        actions, "run", "run the suite; exit 0 when every backend that ran conforms to its preset, 1 when not"
    )
    suite.add_argument("--suite", choices=["quick", "full", "exhaustive"], default="quick", help="default quick")
    suite.add_argument("--backend", action="append", metavar="NAME", help="only this one; may be given again")
    suite.add_argument("--json", metavar="FILE", help="write the report for programs")
    suite.add_argument("--junit", metavar="FILE", help="write the report for continuous integration")
    suite.add_argument("--html", metavar="FILE", help="write the report as a page")
    suite.set_defaults(run=_run)
    listing = add_command(actions, "backends", "which quantizers can run here, and why others cannot")
    listing.add_argument("--json", action="store_true", help="one JSON object on stdout")
    listing.set_defaults(run=_backends)
    capture.add_capture(actions)
    capture.add_replay(actions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader has gone; keep the interpreter from complaining when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (_Refused, ValueError, TypeError, OSError, MemoryError) as error:
        complain(str(error) or "not enough memory")
        return 2


def _run_command(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse: --help, --version, a wrong option
        return stop.code if isinstance(stop.code, int) else 2
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
