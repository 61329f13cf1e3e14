"""A C program over the pipe under the plug-in:  make -C ../../clients/c dut && pytest test_c_program.py"""

from pathlib import Path

from conformance.pytest_plugin import assert_pipe_conforms


def test_c_program():
    assert_pipe_conforms([str(Path(__file__).parents[2] / "clients" / "c" / "dut")])
