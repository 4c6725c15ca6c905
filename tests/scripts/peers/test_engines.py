"""Every engine decodes the forced tokens and computes the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from odmoe.commands.shared.whole_model import load_whole
from odmoe.stores import prepare_store
from scripts.lib.peers import offloaded_model, prepare_offload
from scripts.peers import checkpoints
from scripts.peers.checkpoints import Shape
from scripts.peers.engines import OURS, Eager, Engine, LlamaCpp, Ours, Task, Turn, forced_task
from scripts.peers.gguf_file import interleaved, make_gguf

TASK = forced_task(seed=0, turn=0, tokens=12)


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> Turn:
    return Eager(load_whole(checkpoint, "bfloat16")).answer(TASK)


def test_tasks_are_repeatable_and_each_turn_has_its_own() -> None:
    assert forced_task(0, 0, 12) == TASK
    assert forced_task(0, 1, 12).prompt != TASK.prompt
    assert forced_task(1, 0, 12).prompt != TASK.prompt
    assert len(TASK.prompt) == 128
    assert len(TASK.continuation) == 12


def test_eager_is_given_the_forced_tokens(checkpoint: Path) -> None:
    model = load_whole(checkpoint, "float32")
    found = Eager(model).answer(TASK)
    with torch.inference_mode():
        logits = model(torch.tensor([TASK.prompt + TASK.continuation])).logits[0]
    assert found.choices == logits[len(TASK.prompt) - 1 :].argmax(-1).tolist()
    assert 0 < found.ttft_s
    assert 0 < found.decode_s


@pytest.mark.slow
@pytest.mark.parametrize("system", [{"system": "fully-cached"}, {"system": "hybrimoe", "device_memory": "50%"}])
def test_ours_chooses_the_tokens_of_eager(
    checkpoint: Path, eager: Turn, tmp_path: Path, system: dict[str, str]
) -> None:
    store = tmp_path / "store"
    prepare_store(str(checkpoint), str(store), "bfloat16")
    ours = Ours(Engine(OURS, checkpoint, torch.get_num_threads(), store, {"device_memory": "100%", **system}))
    try:
        found = ours.answer(TASK)
        other = ours.answer(Task(TASK.prompt, TASK.continuation[::-1]))
    finally:
        ours.close()
    assert found.choices == eager.choices
    assert found.exact
    assert found.named == 12 * 2 * 2  # tokens, layers, experts of each
    assert other.choices[0] == found.choices[0]
    assert other.choices != found.choices


def test_accelerate_reads_the_same_experts_from_the_disk(checkpoint: Path, eager: Turn, tmp_path: Path) -> None:
    prepare_offload(str(checkpoint), "bfloat16", tmp_path)
    model = offloaded_model(str(checkpoint), "bfloat16", tmp_path)
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert experts
    assert all(weight.is_meta for weight in experts)
    assert not any(weight.is_meta for name, weight in model.named_parameters() if ".experts." not in name)
    assert Eager(model).answer(TASK).choices == eager.choices


def test_an_offload_folder_is_written_once(checkpoint: Path, tmp_path: Path) -> None:
    prepare_offload(str(checkpoint), "bfloat16", tmp_path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    prepare_offload(str(checkpoint), "bfloat16", tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


def test_rows_of_a_head_go_from_halves_to_pairs() -> None:
    rows = torch.arange(256.0)[:, None]
    found = interleaved(rows, 128)[:, 0].tolist()
    assert found[:6] == [0, 64, 1, 65, 2, 66]
    assert found[128:132] == [128, 192, 129, 193]


def test_a_gguf_has_every_weight(shape: Shape, checkpoint: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the optional extra `peers`")
    file = make_gguf(shape, checkpoint)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert sum(int(tensor.n_elements) for tensor in found.values()) == model.num_parameters()
    down = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    stored = torch.from_numpy(found["blk.1.ffn_down_exps.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(stored.reshape(down.shape), down)


def test_llama_cpp_chooses_the_tokens_of_eager(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="needs the optional extra `peers`")
    pytest.importorskip("llama_cpp", reason="needs the optional extra `peers`")
    monkeypatch.setattr(checkpoints, "PROJECTION_STD", 0.1)  # narrow as it is, attention would else decide nothing
    path = checkpoints.make_checkpoint(shape, tmp_path)
    llama = LlamaCpp(make_gguf(shape, path), 1, 256)
    found = llama.answer(TASK)
    llama.close()
    expected = Eager(load_whole(path, "float32")).answer(TASK)
    same = sum(a == b for a, b in zip(found.choices, expected.choices, strict=True))
    assert same >= 12, "sums are rounded elsewhere, so a near tie may differ"
