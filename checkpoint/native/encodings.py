"""All encodings, by name."""

from __future__ import annotations

from checkpoint.native.encoding import Encoding
from checkpoint.native.fp8 import Fp8
from checkpoint.native.mxfp4 import Mxfp4

ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in (Mxfp4(), Fp8())}

_OF_FORMATS = {"mxfp4": "mxfp4", "fp8": "fp8", "mxfp8": "fp8"}


def encoding_of(method: str) -> Encoding | None:
    """The encoding of a published format (`quant_method`)."""
    return ENCODINGS.get(_OF_FORMATS.get(method, ""))


NATIVE, DEQUANTISED = "native", "dequantised"
"""How a store keeps the experts of a quantised checkpoint."""
