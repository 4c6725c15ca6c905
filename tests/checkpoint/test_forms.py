"""Experts in fewer bits, beside HQQ's own quantiser, whose code has no part in restoring them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import forms as forms_module
from checkpoint.forms import FORMS, Scratch, compiled_routine, planned_form, quantise, restore, restore_into
from checkpoint.manifest import Blob, LayerSpec, TensorSpec
from checkpoint.native import form_routines
from scheduler.errors import CheckpointError
from support.models.hqq_reference import by_hqq

forms = pytest.mark.parametrize("form", FORMS)


def layer_of(parameters: dict[str, torch.Tensor]) -> LayerSpec:
    """As a store describes it; where each lies in the full blob is of no matter here."""
    tensors = tuple(
        TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), 0)
        for name, value in parameters.items()
    )
    return LayerSpec("model.layers.0.mlp.experts", "layer-00000.experts", tensors, (Blob(0, 4096, ""),))


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 80)) | st.tuples(*[st.integers(1, 9)] * 3),
    form=st.sampled_from(list(FORMS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.01, 0.3, 20.0]),
    seed=st.integers(0, 1 << 20),
    compiled=st.booleans(),
)
def test_restored_as_hqq_restores_it(
    shape: tuple[int, ...], form: str, dtype: torch.dtype, spread: float, seed: int, compiled: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    parameters = {
        "up_proj": (torch.randn(shape, generator=random) * spread).to(dtype),
        "up_proj_bias": torch.randn(shape[-1], generator=random).to(dtype),
    }
    layer = layer_of(parameters)
    blob = quantise(parameters, layer, form)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(forms_module, "compiled_routine", lambda bits, dtype: None)
        found = restore(blob, layer, form)
    assert len(blob) == planned_form(layer, form).blobs[0].length
    assert len(blob) % 4096 == blob.data_ptr() % 4096 == 0
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(parameters, dtype)
    assert torch.equal(found["up_proj"], by_hqq(parameters["up_proj"], FORMS[form]))
    assert torch.equal(found["up_proj_bias"], parameters["up_proj_bias"])


def test_more_weights_than_are_restored_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces meet without a seam, where rows do not end with them."""
    monkeypatch.setattr("checkpoint.forms.PIECE", 1 << 13)
    monkeypatch.setattr(forms_module, "compiled_routine", lambda bits, dtype: None)
    weight = torch.randn(191, 187, generator=torch.Generator().manual_seed(1))
    for form in FORMS:
        layer = layer_of({"w": weight})
        assert torch.equal(restore(quantise({"w": weight}, layer, form), layer, form)["w"], by_hqq(weight, FORMS[form]))


@forms
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_an_expert_is_divided_among_threads(form: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no thread has, or two have, would show: what is not restored stays."""
    monkeypatch.setattr(form_routines, "THREAD_WEIGHTS", 1000)
    jobs: list[int] = []
    together = form_routines.together
    monkeypatch.setattr(form_routines, "together", lambda of, with_caller: (jobs.append(len(of)), together(of, True)))
    random = torch.Generator().manual_seed(4)
    weights = {
        name: torch.randn(shape, generator=random).bfloat16() for name, shape in (("a", (67, 130)), ("b", (5, 9)))
    }
    layer = layer_of(weights)
    full = {name: torch.full_like(weight, 7.0) for name, weight in weights.items()}
    views = planned_form(layer, form).views(quantise(weights, layer, form))
    restore_into(full, views, FORMS[form], Scratch.for_layers([layer], 64), threads)
    assert jobs == [threads]
    assert all(torch.equal(full[name], by_hqq(weights[name], FORMS[form])) for name in weights)


def test_two_threads_restore_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each an expert of its own, and both with the same pool of threads."""
    monkeypatch.setattr(form_routines, "THREAD_WEIGHTS", 1000)
    random = torch.Generator().manual_seed(5)
    weights = [torch.randn(200, 300, generator=random).bfloat16() for _ in range(2)]
    layer = layer_of({"w": weights[0]})
    blobs = [quantise({"w": weight}, layer, "int4") for weight in weights]
    views = [planned_form(layer, "int4").views(blob) for blob in blobs]
    expected = [by_hqq(weight, 4) for weight in weights]

    def restored(number: int) -> bool:
        full, scratch = {"w": torch.empty_like(weights[0])}, Scratch.for_layers([layer], 64)
        same = []
        for _ in range(50):
            full["w"].fill_(7.0)
            restore_into(full, views[number], 4, scratch, 2)
            same.append(torch.equal(full["w"], expected[number]))
        return all(same)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(restored, range(2), timeout=60))


@forms
@pytest.mark.parametrize("dtype", form_routines.DTYPES)
def test_a_cpu_restores_by_a_compiled_routine(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    routine = compiled_routine(FORMS[form], dtype)
    assert routine is compiled_routine(FORMS[form], dtype) is not None
    assert compiled_routine(FORMS[form], torch.float16) is None
    monkeypatch.setattr(forms_module, "_restore_weight", None)
    layer = layer_of({"w": torch.randn(20, 30).to(dtype)})
    restore(quantise({"w": torch.randn(20, 30).to(dtype)}, layer, form), layer, form)


def test_routines_are_compared_over_scales_and_zeros_of_all_exponents() -> None:
    scale, zero = form_routines.check_halves()
    for halves in (scale, zero):
        assert halves.isfinite().all()
        assert halves.abs().max() > 60_000
        assert 0 < halves[halves > 0].min() < 2.0**-14, "subnormal"
        assert halves.min() < -60_000
    exponents = (scale.view(torch.int16) >> 10 & 31).unique()
    assert exponents.tolist() == list(range(31))


def test_fewer_bits_are_fewer_bytes_and_a_larger_error() -> None:
    weight = torch.randn(512, 768, generator=torch.Generator().manual_seed(2)) * 0.05
    layer, size, error = layer_of({"w": weight}), {}, {}
    for form in FORMS:
        blob = quantise({"w": weight}, layer, form)
        size[form] = len(blob) * 8 / weight.numel()
        error[form] = float((restore(blob, layer, form)["w"] - weight).norm() / weight.norm())
    assert size == pytest.approx({"int4": 4.5, "int2": 2.5}, abs=0.05)
    # evenly spaced levels over six sigma of 64 normal weights: a step's third root of twelve, roughly
    assert 0.05 < error["int4"] < 0.12
    assert 0.3 < error["int2"] < 0.5


@forms
def test_the_same_bytes_every_time(form: str) -> None:
    weight = torch.randn(96, 100, generator=torch.Generator().manual_seed(3)).bfloat16()
    layer = layer_of({"w": weight})
    assert torch.equal(quantise({"w": weight}, layer, form), quantise({"w": weight.clone()}, layer, form))


@forms
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1000.0])
def test_weights_that_hardly_vary(form: str, value: float) -> None:
    """HQQ's zero of such a group is beyond float16."""
    noise = torch.linspace(-1e-3, 1e-3, 640).view(10, 64)
    for weight in (torch.full((10, 64), value), value + noise):
        layer = layer_of({"w": weight})
        found = restore(quantise({"w": weight}, layer, form), layer, form)["w"]
        assert float((found - weight).abs().max()) <= 2e-3 + abs(value) / 1000


@forms
def test_weights_that_cannot_be_scaled_are_named(form: str) -> None:
    weight = torch.linspace(-1e7, 1e7, 6400).view(100, 64)[torch.randperm(100)].t().contiguous()
    with pytest.raises(CheckpointError, match=rf"experts\.w cannot be quantised to {form}.*float16"):
        quantise({"w": weight}, layer_of({"w": weight}), form)
