"""Language-neutral vectors of every rule, and the text pipe between a generator, a device under test and a verifier.

    nvfp4 vectors export DIR                                          files for any language (export.py, lint.py)
    nvfp4 vectors generate | DUT | nvfp4 vectors verify               a line an operation (pipe.py, verify.py)

Data flows down this list: ``fields`` (what an operand is, as bits and as text), ``operations`` (what is asked, with
the oracle's answer), ``operands`` (the edges, constructed), ``tensors`` (whole tensors), ``groups`` (which of them
belong to which rule, and the faults that they hunt), then the two ways out.
"""

#: Version of the files' format (docs/vectors.md) and of the line protocol (docs/pipe.md).  What the vectors say is of
#: ``nvfp4ref.SPEC_VERSION``: any change of an expected bit is a new one of those.
FORMAT_VERSION = 1
