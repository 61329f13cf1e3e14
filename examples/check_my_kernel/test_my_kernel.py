"""One assertion in a test of your own:  pytest test_my_kernel.py"""

import ml_dtypes
import numpy as np
from broken_kernel import kernel

from conformance.pytest_plugin import assert_nvfp4_equal


def test_my_kernel():
    x = np.random.default_rng(2).standard_normal((512, 512)).astype(ml_dtypes.bfloat16)
    assert_nvfp4_equal(kernel(x), x)
