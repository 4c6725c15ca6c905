"""All encodings, by name."""

from __future__ import annotations

from checkpoint.native.codebook import Codebook
from checkpoint.native.encoding import Encoding
from checkpoint.native.fp8 import Fp8
from checkpoint.native.integers import Integers
from checkpoint.native.mxfp4 import Mxfp4
from checkpoint.native.mxfp4_outputs_first import Mxfp4OutputsFirst

MXFP4, FP8, INTEGERS, GGML_INTEGERS = "mxfp4", "fp8", "integers", "ggml integers"
MXFP4_OUTPUTS_FIRST = Mxfp4OutputsFirst.name
CODEBOOK, GGML_CODEBOOK = "codebook", "ggml codebook"
_GGML = Integers(GGML_INTEGERS, rounds=False)
ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        *(Mxfp4(), Mxfp4OutputsFirst(), Fp8(), Integers(INTEGERS, rounds=True), _GGML),
        *(Codebook(CODEBOOK), Codebook(GGML_CODEBOOK, _GGML)),
    )
}

NATIVE, DEQUANTISED = "native", "dequantised"
"""How a store keeps the experts of a quantised checkpoint."""
