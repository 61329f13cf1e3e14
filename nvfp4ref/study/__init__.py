"""Studies of quantization error: statistics, streaming over checkpoints, tables, figures and pages.

    from nvfp4ref import study
    found = study.measure(x, ["nvfp4", "nvfp4+16x16", "mxfp4"])
    found["nvfp4"].relative_mse, found["nvfp4"].rows, found["nvfp4"].blocks

``study.study_files(paths)`` and ``nvfp4 study FILE… -o DIR`` do that for every tensor of a checkpoint.  Definitions:
docs/studies/README.md.
"""

from .files import Study, study_files
from .formats import DEFAULT, Format, named, of_recipe, several
from .pieces import Measurement, measure

__all__ = ["DEFAULT", "Format", "Measurement", "Study", "measure", "named", "of_recipe", "several", "study_files"]
