"""Recording what a machine answers, in one file, and judging it later on any other machine.

    nvfp4 conformance capture -o b200.nvfp4      record.py starts a child.py for each backend and probe
    nvfp4 conformance replay b200.nvfp4          replay.py recomputes every answer; witness.py makes evidence of it

The format is bundle.py's, the folder of an unfinished one journal.py's.
"""
