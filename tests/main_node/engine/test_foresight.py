"""Foresight: what was foretold against what the gate then said, and an answer that does not change by it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import family as families
from checkpoint.dense import EXPERTS_IMPLEMENTATION, dispatch_experts
from checkpoint.gates import Gates
from checkpoint.prediction import token_predictor
from checkpoint.prediction.token_predictor import TokenPredictor
from main_node.engine.foresight import Foresight, GateForesight, TokenForesight, make_foresight
from scheduler import types as t
from scheduler.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    MissingShardError,
    UnsupportedFamilyError,
)
from support.cases import slow_except
from support.models.families import build_dispatching

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
STEPS = 6
EXACT = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe"),
    *("granitemoe", "minimax", "qwen3_next"),
)
NAMES = ("mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_moe")
KINDS = ("gate", "gates", "attention", "token")


class Main:
    """Transformers' model, greedy, its own experts called as the main node calls the engine's. `resident`: of each
    token's experts so many, the last named, are told as the partial output; None: it is not known in time."""

    def __init__(self, model: Any, kind: Any = None, file: Path | None = None, resident: int | None = 99) -> None:
        self.model, self.resident = model, resident
        layers = families.experts_modules(model)
        top_k = model.config.get_text_config().num_experts_per_tok
        self.shape = t.ModelShape(tuple(layers), 8, top_k)
        self.gates = Gates(model)
        self.cache: Any = None
        dispatch_experts(model, self._experts_of)
        self.foresight: Foresight | None = make_foresight(kind, model, self.gates, self.shape, lambda: self.cache, file)
        self.told: list[t.Foreseen] = []
        self.said: dict[tuple[int, int], torch.Tensor] = {}
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}

    def _experts_of(self, layer: int) -> Any:
        module = families.experts_modules(self.model)[layer][1]
        eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]

        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            def partial() -> torch.Tensor | None:
                if self.resident is None:
                    return None
                known = weights.clone()
                known[:, : max(0, index.shape[1] - self.resident)] = 0
                given: torch.Tensor = eager(module, hidden, index, known)
                return given

            self.said[self.position, layer] = self.gates.ranked_scores(layer).clone()
            self.inputs[self.position, layer] = hidden.clone()
            if self.foresight is not None:
                self.told += self.foresight.ahead(t.Visit(1, self.position, layer), hidden, partial)
            output: torch.Tensor = eager(module, hidden, index, weights)
            return output

        return experts

    def answer(self, prompt: list[int] = PROMPT, steps: int = STEPS) -> tuple[list[int], torch.Tensor]:
        """Tokens, and the logits [steps, V] that chose them."""
        self.cache, tokens, logits = families.new_cache(self.model.config), prompt, []
        self.position = 0
        answer: list[int] = []
        with torch.inference_mode():
            for _ in range(steps):
                out = self.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache, use_cache=True)
                self.position += len(tokens)
                logits.append(out.logits[0, -1])
                tokens = [int(logits[-1].argmax())]
                answer += tokens
        return answer, torch.stack(logits)


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a predictor that is a model's own gates: it foretells the token's own experts."""

    def write(model: Any) -> Path:
        gates = Gates(model)
        weights = {n: torch.randn(8, 64, generator=torch.Generator().manual_seed(n)) for n in gates.layers}
        token_predictor.save(TokenPredictor(weights, {"samples": 3}), gates, tmp_path / token_predictor.FILE)
        return tmp_path / token_predictor.FILE

    return write


@pytest.mark.parametrize(("name", "kind"), slow_except(tuple(zip(NAMES, KINDS, strict=False)), product(NAMES, KINDS)))
def test_the_answer_is_the_same_bit_for_bit(name: str, kind: str, token_file: Callable[[Any], Path]) -> None:
    model = build_dispatching(name)
    tokens, logits = Main(model).answer()
    main = Main(model, kind, token_file(model), resident=1)
    again, seen = main.answer()
    assert main.told
    assert again == tokens
    assert torch.equal(seen, logits)


@pytest.mark.parametrize("name", EXACT)
def test_attention_with_all_experts_foretells_the_next_gate_exactly(name: str) -> None:
    main = Main(build_dispatching(name), "attention")
    main.answer()
    assert len(main.told) >= STEPS - 1
    for told in main.told:
        assert told.scores == tuple(map(tuple, main.said[told.position, told.layer].tolist()))
    if name in ("mixtral", "qwen2_moe", "deepseek_v3"):  # every layer, across dense ones, but the first
        assert len(main.told) == (STEPS - 1) * (len(main.gates.layers) - 1)


def test_a_run_ahead_computes_nothing_after_the_next_gates_input() -> None:
    main = Main(build_dispatching("qwen2_moe"), "attention")
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    shared = [module for path, module in main.model.named_modules() if path.endswith("shared_expert.up_proj")]
    for module in shared:
        module.register_forward_hook(count)
    main.answer()
    assert main.told
    assert calls == STEPS * len(shared)


def test_attention_with_some_experts_foretells_something_else() -> None:
    main = Main(build_dispatching("qwen2_moe"), "attention", resident=1)
    main.answer()
    off = [(torch.tensor(told.scores) - main.said[told.position, told.layer]).abs().max().item() for told in main.told]
    assert min(off) > 0
    later = Main(main.model, "attention", resident=None)
    later.answer()
    assert later.told == []


def test_a_request_that_is_over_is_let_go() -> None:
    main = Main(build_dispatching("mixtral"), "attention")
    main.answer()
    held = weakref.ref(main.cache)
    main.cache = None
    gc.collect()
    assert held() is None


def test_attention_is_refused_of_layers_that_hand_on_more() -> None:
    with pytest.raises(UnsupportedFamilyError, match="inkling2_text: what the next gate will say cannot"):
        Main(build_dispatching("inkling2_text"), "attention")
    model = build_dispatching("mixtral")
    original = model.model.layers[2].forward
    calls: list[int] = []
    vars(model.model.layers[2])["forward"] = lambda *args, **kwargs: original(args[0] + len(calls), *args[1:], **kwargs)
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedFamilyError, match=r"gates of layers \[2\]|changes where layers are run ahead"):
        Main(model, "attention")


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_gates_are_those_of_the_next_layers_on_this_layers_input(name: str) -> None:
    """Against the gate module of Transformers, called on the rows that this layer's experts got."""
    main = Main(build_dispatching(name), "gates")
    main.answer()
    layers = main.gates.layers
    passes = list(dict.fromkeys(position for position, _ in main.said))
    source = [(p, seen, m) for p in passes for n, seen in enumerate(layers) for m in layers[n + 1 : n + 4]]
    assert [(told.position, told.layer) for told in main.told] == [(p, layer) for p, _, layer in source]
    for told, (position, seen, layer) in zip(main.told, source, strict=True):
        rows = main.inputs[position, seen]
        gate = main.model.model.layers[layer].mlp.gate
        with torch.inference_mode():
            logits, _, index = gate(rows)
        scores = torch.tensor(told.scores)
        assert len(scores) == len(rows)
        assert torch.equal(scores.topk(index.shape[1]).indices.sort(1).values, index.sort(1).values)
        if name == "mixtral":
            assert torch.allclose(scores, logits.softmax(-1))
    one = Main(main.model, "gate")
    one.answer()
    assert [(told.position, told.layer) for told in one.told] == [
        (position, layer) for position in dict.fromkeys(p for p, _ in one.said) for layer in layers[1:]
    ]


def test_token_tells_of_the_next_pass(token_file: Callable[[Any], Path]) -> None:
    model = build_dispatching("mixtral")
    main = Main(model, "token", token_file(model))
    main.answer()
    assert [(told.position, told.layer) for told in main.told] == [
        (len(PROMPT) + step, layer) for step in range(STEPS) for layer in range(4)
    ]
    for told in main.told:
        assert len(told.scores) == 1
        before = told.position - 1 if told.position > len(PROMPT) else 0
        row = main.inputs[before, told.layer][-1]
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(told.layer))
        assert torch.allclose(torch.tensor(told.scores[0]), (weight @ row).softmax(0), atol=1e-5)


@pytest.mark.slow
def test_token_learns_from_what_is_decoded(demo: Path) -> None:
    """Of a trained model: what it says of each next token gets better; without learning it stays where it was."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)

    def losses(rate: float) -> list[float]:
        main = Main(model)
        shape = (8, model.config.hidden_size)
        zero = TokenPredictor({n: torch.zeros(shape) for n in main.gates.layers})
        main.foresight = TokenForesight(zero, main.gates, main.shape, rate)
        main.answer(steps=60)
        found = []
        for told in main.told:
            if (truth := main.said.get((told.position, told.layer))) is not None:
                wanted = token_predictor.targets(truth, 2)
                found.append(float(torch.nn.functional.cross_entropy(torch.tensor(told.scores).log(), wanted)))
        return found

    still, learned = losses(0.0), losses(0.3)
    last = len(learned) // 2
    assert sum(learned[-last:]) < 0.92 * sum(still[-last:])
    assert max(still) == pytest.approx(min(still))


def test_a_step_is_down_the_slope_that_torch_finds() -> None:
    random = torch.Generator().manual_seed(3)
    weight, row = torch.randn(6, 10, generator=random), torch.randn(1, 10, generator=random)
    target = token_predictor.targets(torch.rand(1, 6, generator=random), 2)
    leaf = weight.clone().requires_grad_()
    torch.nn.functional.cross_entropy(row @ leaf.T, target).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    predictor = TokenPredictor({0: weight.clone()})
    predictor.learn(0, row, target, 0.25)
    assert torch.allclose(predictor.weights[0], weight - 0.25 * leaf.grad / row.square().sum(), atol=1e-6)


def test_a_file_that_is_not_this_models(token_file: Callable[[Any], Path], tmp_path: Path) -> None:
    model = build_dispatching("mixtral")
    with pytest.raises(ConfigError, match="needs trained weights"):
        Main(model, "token")
    with pytest.raises(MissingShardError, match=r"none.safetensors is not there; train it"):
        Main(model, "token", tmp_path / "none.safetensors")
    path = token_file(model)
    assert token_predictor.load(path, Gates(model)).facts == {"samples": 3}
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight += 0.1
    with pytest.raises(CheckpointError, match="another model"):
        Main(model, "token", path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match="train it"):
        Main(model, "token", path)


def test_nothing_is_made_of_nothing() -> None:
    main = Main(build_dispatching("mixtral"))
    assert main.foresight is None
    assert GateForesight(main.gates).ahead(t.Visit(1, 0, 3), torch.zeros(1, 64), lambda: None) == []
