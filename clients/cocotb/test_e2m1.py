"""The design held to the vectors of four rules: `make` in this folder, with cocotb and a simulator."""

import os
from pathlib import Path

import cocotb
from cocotb.triggers import Timer
from nvfp4_bench import check

VECTORS = Path(os.environ.get("NVFP4_VECTORS", Path(__file__).with_name("vectors")))


@cocotb.test()
async def e2m1_codes(dut):
    rules = ("E2M1-RNE", "E2M1-SATURATE", "E2M1-NAN", "E2M1-ZERO")
    done = await check(dut, lambda: Timer(1, "ns"), VECTORS, "e2m1", *rules)
    dut._log.info("%d rows right", done)
