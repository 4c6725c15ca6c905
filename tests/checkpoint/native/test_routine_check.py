"""Which way restores on a CPU: a compiled routine that differs, or cannot be made, is not used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.forms import FORMS, compiled_routine
from checkpoint.native import form_routines, routine_check
from checkpoint.native.encoding import CODES, SCALES, Encoding
from checkpoint.native.encodings import ENCODINGS
from checkpoint.native.form_routines import FormRoutine, Weight
from checkpoint.native.routine_check import Routine
from support.paths import ROOT

RESTORED = (*(name.replace(" ", "-") for name in ENCODINGS), *FORMS)
"""Names of what compiled routines restore."""

each_encoding = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routine_check, "_routines", {})


@each_encoding
def test_another_default_dtype_changes_no_weight_to_compare(encoding: Encoding) -> None:
    """Transformers sets it for the whole process while a model is built."""
    expected = encoding.check_weights()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = encoding.check_weights()
    finally:
        torch.set_default_dtype(torch.float32)
    for (_, one), (_, other) in zip(found, expected, strict=True):
        for name in one.keys() | other.keys():
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)


def refused(encoding: Encoding, caplog: pytest.LogCaptureFixture) -> str:
    """The warning with which the routine is refused. Weights are then restored with torch."""
    with caplog.at_level(logging.WARNING):
        assert encoding.checked_routine(torch.bfloat16) is None
    for shape, parts in encoding.check_weights():
        scratch = torch.empty(encoding.scratch_for([shape], "cpu", 2), dtype=torch.uint8)
        found = {"up": torch.full(shape, 7.0, dtype=torch.bfloat16)}
        encoding.restore_into(found, {f"up.{name}": part for name, part in parts.items()}, scratch)
        expected = torch.empty(shape, dtype=torch.bfloat16)
        encoding.restore(expected, parts, scratch[0], 1000)
        assert torch.equal(found["up"].view(torch.int16), expected.view(torch.int16))
    return caplog.text


@each_encoding
def test_bfloat16_on_a_cpu_is_restored_by_a_compiled_routine(encoding: Encoding) -> None:
    assert encoding.checked_routine(torch.bfloat16) is encoding.checked_routine(torch.bfloat16) is not None
    for dtype in (torch.float16, torch.float32):
        assert (encoding.checked_routine(dtype) is not None) == (dtype in encoding.compiled_dtypes)


def test_the_check_weight_of_mxfp4_has_every_number_in_every_column() -> None:
    """And every scale, beside an ordinary one and beside an extreme one."""
    ((shape, parts),) = ENCODINGS["mxfp4"].check_weights()
    codes, scales = parts[CODES], parts[SCALES]
    both = torch.stack((codes & 15, codes >> 4), dim=1).view(shape)
    assert all(column.unique().numel() == 16 for block in both.split(32) for column in block.t())
    assert all(scales[row].unique().numel() == 255 for row in (0, 2))


def test_the_check_weights_of_fp8_have_every_number_in_every_block() -> None:
    """And every scale of E8M0 that a store may have, and scales in float32 of both signs."""
    weights = [(shape, parts[CODES], parts[SCALES]) for shape, parts in ENCODINGS["fp8"].check_weights()]
    for shape, codes, scales in weights:
        height, width = (all_ // parts for all_, parts in zip(shape, scales.shape, strict=True))
        for rows in codes.split(height):
            assert all(block.unique().numel() == 254 for block in rows.split(width, dim=1))
    (_, _, floats), (_, _, e8m0) = weights
    assert e8m0.unique().tolist() == list(range(246))
    assert floats.abs().max() > 2.0**118
    assert 250 < (floats < 0).sum() < 262


@pytest.mark.slow
@each_encoding
@pytest.mark.parametrize("where", [0, -1, 3333])
def test_a_routine_with_one_other_bit_is_not_used(
    encoding: Encoding, where: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = encoding.routine()
    assert right is not None

    def wrong(target: torch.Tensor, *rest: Any) -> None:
        right(target, *rest)
        target.view(torch.int16).view(-1)[where] ^= 1

    assert encoding.is_equal(right)
    monkeypatch.setattr(type(encoding), "routine", lambda self, dtype: wrong)
    assert "gives other bits than torch" in refused(encoding, caplog)


@pytest.mark.parametrize("where", [0, -1, 3333])
@pytest.mark.parametrize("bits", FORMS.values(), ids=FORMS.keys())
def test_a_routine_of_a_form_with_one_other_bit_is_not_used(
    bits: int, where: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = form_routines._compiled

    def compiled(*of: Any) -> FormRoutine:
        right = made(*of)

        def wrong(weight: Weight, first: int, last: int) -> None:
            right(weight, first, last)
            weight[0].view(torch.int16)[where] ^= 1

        return wrong

    monkeypatch.setattr(form_routines, "_compiled", compiled)
    with caplog.at_level(logging.WARNING):
        assert compiled_routine(bits, torch.bfloat16) is None
    assert f"the compiled routine of int{bits} in torch.bfloat16 gives other bits than torch" in caplog.text


@pytest.mark.parametrize("bits", FORMS.values(), ids=FORMS.keys())
def test_torch_restores_forms_where_numba_fails(
    bits: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(*of: Any) -> FormRoutine:
        raise ImportError("no module named numba")

    monkeypatch.setattr(form_routines, "_compiled", compiled)
    with caplog.at_level(logging.WARNING):
        assert compiled_routine(bits, torch.bfloat16) is None
        assert compiled_routine(bits, torch.bfloat16) is None
    assert f"torch restores int{bits} in torch.bfloat16, several times slower" in caplog.text
    assert len(caplog.records) == 1, "one warning a process"


@pytest.mark.slow
@each_encoding
@pytest.mark.parametrize(
    "error", [ImportError("no module named numba"), EOFError("Ran out of input"), TypeError("odd")]
)
def test_torch_restores_where_numba_fails(
    encoding: Encoding, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def routine(self: Any, dtype: torch.dtype) -> Routine:
        raise error

    monkeypatch.setattr(type(encoding), "routine", routine)
    assert str(error) in refused(encoding, caplog)
    assert encoding.checked_routine(torch.bfloat16) is None
    assert len(caplog.records) == 1, "one warning a process"


IN_A_PROCESS = """
from odmoe.clusters.process import prepare_process
prepare_process()
import torch
torch.set_num_threads(1)
from checkpoint.native.encodings import ENCODINGS
for encoding in ENCODINGS.values():
    print(encoding.name.replace(" ", "-"), encoding.checked_routine(torch.bfloat16) is not None)
from checkpoint.forms import FORMS, compiled_routine
for form, bits in FORMS.items():
    print(form, compiled_routine(bits, torch.bfloat16) is not None)
"""


def in_a_process(**environment: str) -> subprocess.CompletedProcess[str]:
    """Which routines are used where numba is set up by these variables; the warnings that a user sees."""
    command = [sys.executable, "-c", IN_A_PROCESS]
    given = os.environ | environment
    return subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.slow
def test_a_user_sees_why_torch_restores() -> None:
    """numba compiles nothing here."""
    ended = in_a_process(NUMBA_DISABLE_JIT="1")
    assert ended.stdout.split() == [word for name in RESTORED for word in (name, "False")]
    of_dtypes = [
        name if len(one.compiled_dtypes) == 1 else f"{name} in torch.bfloat16" for name, one in ENCODINGS.items()
    ]
    for name in (*of_dtypes, "int4 in torch.bfloat16", "int2 in torch.bfloat16"):
        assert ended.stderr.count(f"torch restores {name}, several times slower") == 1


@pytest.mark.slow
def test_routines_are_compiled_for_the_processor_that_numba_is_set_to(tmp_path: Path) -> None:
    """Without the instructions that this one has. And nothing is kept that could be damaged, or be run elsewhere."""
    ended = in_a_process(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path))
    assert ended.stdout.split() == [word for name in RESTORED for word in (name, "True")]
    assert not ended.stderr
    assert not list(tmp_path.iterdir())


def test_scratch_memory_that_is_too_short_is_refused() -> None:
    """A compiled routine would write beyond it."""
    for encoding in ENCODINGS.values():
        ((shape, parts), *_) = encoding.check_weights()
        target, routine = torch.empty(shape, dtype=torch.bfloat16), encoding.routine()
        with pytest.raises(ValueError, match="scratch memory has 100 bytes"):
            routine(target, parts, torch.empty(100, dtype=torch.uint8))
