"""The main node: Transformers' own model without its experts, the KV caches and the token loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from functools import cached_property, partial
from typing import Any

import torch

from checkpoint import family, kv
from checkpoint.dense import dispatch_experts, held_bytes, load_dense
from checkpoint.devices.names import accelerator_name
from checkpoint.devices.transfer import to_host, token_ids
from checkpoint.generation.own_path import OwnPath
from checkpoint.generation.rotary import Rotary
from checkpoint.linear_batch import at_once, batch_linear
from checkpoint.mtp_head import MtpHead
from checkpoint.native.encoded_linear import use_fast_kernel
from checkpoint.prefix_cache import PrefixReading
from checkpoint.store import ExpertStore
from main_node.admission import Admission, Sharing
from main_node.answer import Answer, Step, TokenLoops, step_of
from main_node.block import Block, row_experts
from main_node.choosing.chooser import Chooser, Ends, check_settings
from main_node.choosing.prompt_scores import OutputLayer, PromptScores
from main_node.chunks import Chunks, Sizes
from main_node.current import Current
from main_node.drafting import MTP, Drafting
from main_node.engine.engine import Engine
from main_node.engine.experts import RemoteExperts
from main_node.engine.gate_watch import GateWatch, PassMemory, needs_watch
from main_node.engine.sequence import Sequence
from main_node.exactness import changed_weights
from main_node.kept_prompts import KeptPrompts
from main_node.report import MainMemory, Report, Times, build_report
from main_node.request import Request
from main_node.sampling import GREEDY, Sampling
from main_node.shadow_start import ShadowStart
from main_node.shape import check_prompt, model_shape, with_context
from main_node.sources import Computing, PredictionSources, TextRules
from main_node.steps import PassJob, Steps
from scheduler import types as t
from scheduler.errors import ConfigError, NonFiniteError
from wire import runtime
from wire.machine import processor_name

LAST_PREDICTIONS_S = 10.0
"""Longest wait for an answer's last predictions, so that recall counts them."""


class MainNode:
    """Answers requests. Several may be open at once: their passes run together, step by step."""

    def __init__(
        self,
        store: ExpertStore,
        engine: Engine,
        computing: Computing,
        shadow: ShadowStart | None = None,
        sharing: Sharing = Sharing(),
        text: TextRules = TextRules(),
        prediction: PredictionSources = PredictionSources(),
    ) -> None:
        """Raises ConfigError for drafts with a policy that reads the scores of gates."""
        self.store = store
        self.engine = engine
        self.device, linear, drafts = torch.device(computing.device), computing.linear, prediction.drafts
        self.model = load_dense(store.dense, store.manifest.config, computing.dtype, self.device)
        check_settings(self.model)
        linear.replace_in(self.model)
        if linear.kernel == "fast":
            use_fast_kernel(self.model)
        self.device_text = f"{self.device} ({_device_name(self.device)})"
        self._own_path, self._rotary = OwnPath(self.model), Rotary(self.model)
        self.kernel = linear.kernel
        """Of the experts too. With any but `exact`, answers may differ from those of Transformers."""
        self.shape = with_context(model_shape(store), sharing.context)
        self.text = text
        self.on_logits: Callable[[int, torch.Tensor], None] | None = None
        """Gets a request's number and the logits [V], float32, on the host, from which each of its tokens is chosen."""
        self.launch_s = sharing.launch_s
        self._shadow = shadow
        self._numbers = itertools.count(1)
        self._batched = sharing.batch_dense
        if sharing.batch_dense or drafts is not None:
            batch_linear(self.model)
        self._head: MtpHead | None = None
        if drafts is not None and drafts.origin == MTP:
            self._head = MtpHead(store, self.model, computing.dtype)
            self.model.base_model.register_forward_hook(self._keep_states)
        self.drafting = Drafting(drafts, self.shape.experts, self.shape.top_k, self._head)
        self.admission = Admission(sharing, lambda: engine.deadlines.waited_s)
        self._current: Current | None = None
        self._loops = TokenLoops()
        self._cache_bytes_max = 0
        self._noting = runtime.Lock()
        strategy, watch = engine.core.strategy, None
        if needs_watch(strategy) and drafts is not None:
            raise ConfigError("--draft needs a system whose policies read no scores of gates, such as od-moe; give 0")
        if needs_watch(strategy):
            weights, rate, trial = prediction.token_file, prediction.learning_rate, engine.prediction_trial
            watch = GateWatch(self.model, strategy, self.shape, self._cache, weights, rate, trial)
        self.experts = RemoteExperts(engine, watch)
        dispatch_experts(self.model, self._experts_of)
        self._output_layer = OutputLayer(self.model, self._scores)
        chunk = sharing.prefill_chunk if kv.continues(self.model.config) and self._rotary.chunks else 0
        about = f"{store.manifest.model_digest}, {store.manifest.dtype}, {self.device_text}, kernel {self.kernel}"
        watched, by_length = needs_watch(engine.core.strategy), self._rotary.by_length
        self.kept = KeptPrompts(sharing.keeping, self.model.config, self.device, chunk, watched, by_length, about)
        self.kept.join_blocks(self.model)
        engine.checks.on_wrong_outputs = self.kept.forget
        self.steps = Steps(
            engine, sharing.launch_s, self.kept.chunk, sharing.batch_dense, self._leave, self.drafting.on_step_ended
        )

    def _cache(self) -> Any:
        """The KV cache of the request whose pass is under way, None between passes."""
        return self._current.cache if self._current is not None else None

    def _keep_states(self, module: Any, inputs: Any, output: Any) -> None:
        """Rows of a block and chunks of a prompt end in their order."""
        if self._current is not None:
            self._current.states.append(output.last_hidden_state)

    def _scores(self) -> PromptScores | None:
        """Of the request whose pass is under way, where log-probabilities of its prompt are wanted."""
        return self._current.scores if self._current is not None else None

    def _enter(self, current: Current, memory: PassMemory | None) -> None:
        """A pass begins or goes on on this thread."""
        self._current = current
        self._rotary.tokens = current.whole
        if self.experts.watch is not None and memory is not None:
            self.experts.watch.use(memory)

    def _leave(self) -> None:
        """No pass is under way: refer to no request, so that its cache is freed with its answer."""
        self._current = None
        self._rotary.tokens = 0
        if self.experts.watch is not None:
            self.experts.watch.use(PassMemory(final=True))

    def _experts_of(self, layer: int) -> Callable[..., torch.Tensor]:
        def experts(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self._current is None:
                raise RuntimeError("the experts of a model belong to a pass; call MainNode.generate")
            if self._current.in_block:
                return row_experts(layer, hidden, index, weights)
            return self.experts.compute(self._current.visit._replace(layer=layer), hidden, index, weights)

        return experts

    # --- requests -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        ignore_eos: bool = False,
        sampling: Sampling = GREEDY,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        schema: str | None = None,
    ) -> Answer:
        """The answer, a token at a time, then a closing step with its report.

        It ends with an end-of-sequence token of the model or the tokenizer (unless `ignore_eos`), with one of
        `stop_token_ids`, with the token that completes one of the texts in `stop`, after `max_new_tokens`, or where the
        context is full. With the first token the answer takes its place among those that are computed at once, and
        keeps it until its last token or until it is closed. The report waits for predictions that the shadow owes, for
        at most `LAST_PREDICTIONS_S`.

        `logprobs`: each step has the log-probabilities of its token and of so many most probable ones.
        `prompt_logprobs`: so has the first step of the prompt's tokens. `schema`: a JSON schema, as text, that the
        answer's text follows. The answer ends where its JSON is complete; cut short by its length, it is the beginning
        of one. None: without.

        Raises PromptError, ConfigError. Iterating raises RequestError, ClusterError.
        """
        vocabulary = self.model.get_input_embeddings().num_embeddings
        check_prompt(prompt, self.shape.context, vocabulary)
        if max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {max_new_tokens}; allowed: 1, 2, ...")
        if stop and self.text.stopper is None:
            raise ConfigError(f"stop is {stop}; this main node was made without a tokenizer to find it")
        if schema is not None and self.text.guides is None:
            raise ConfigError("a schema is given, but this main node was made without a tokenizer to follow it")
        for name, top in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if top is not None and not 0 <= top <= vocabulary:
                raise ConfigError(f"{name} is {top}; allowed: 0 to {vocabulary}, the model's number of tokens")
        room = min(max_new_tokens, self.shape.context - len(prompt))
        guides, stopper = self.text.guides, self.text.stopper
        follow = partial(guides, schema) if schema is not None and guides is not None else None
        ends = Ends(ignore_eos, self.text.end_token, stop_token_ids)
        chooser = Chooser(self.model, sampling, prompt, room, logprobs, follow, ends)
        sequence = Sequence(prompt, room, family.new_cache(self.model.config))
        stopped = stopper(stop, prompt) if stop and stopper is not None else None
        scores = PromptScores(prompt, prompt_logprobs) if prompt_logprobs is not None else None
        request = Request(next(self._numbers), sequence, chooser, stopped, chooser.logprobs, scores)
        steps = self._steps(request)
        answer = Answer(self._give_up, request, steps)
        self._loops.add(answer, steps)
        return answer

    def _give_up(self, request: Request) -> None:
        """From any thread."""
        self.admission.wake_waiting()
        self.engine.close_request(request.number)
        self.steps.drop(request)

    def _steps(self, request: Request) -> Generator[Step]:
        """Open the request, run its token loop, close it."""
        began = runtime.perf_counter()
        with self.admission.place(request) as leave, self.engine.serving(request):
            with self._computing(request):
                request.check_wanted()  # it may have been cancelled before the engine knew it
                last, finish, times = yield from self._tokens(request, began)
            request.sequence.free()
            leave()
            yield last
            complete = self.engine.wait_for_predictions(request.number, LAST_PREDICTIONS_S)
            report = self._report(request, times, finish, complete)
        yield Step(None, report)

    @contextlib.contextmanager
    def _computing(self, request: Request) -> Iterator[None]:
        """Around all passes of a request: until it has its last token, or ends without."""
        with contextlib.ExitStack() as at_end:
            at_end.callback(self.engine.on_answered, request)
            at_end.callback(request.forget_predictions)
            at_end.callback(self._note_cache_bytes)
            at_end.callback(self.kept.on_ended, request)
            at_end.enter_context(self.steps.taking_part(request))
            prompt, room = request.sequence.prompt, request.sequence.max_new_tokens
            request.drafts = self.drafting.begin(prompt, room, request.check_wanted)
            yield

    def _tokens(self, request: Request, began: float) -> Generator[Step, None, tuple[Step, str, Times]]:
        """The token loop: the prompt, in one pass or in chunks, then a pass a token. Returns the last token's step and
        why it is the last. `began`: when the client asked for the first token."""
        sequence, number = request.sequence, request.number
        lost_before = self.engine.pace.lost_s
        gained = self._read_prompt(request)
        first = runtime.perf_counter()
        carried = self.engine.token_traffic(number)
        shadow_wait_s = longest_s = 0.0
        last = first
        if self._shadow is not None:
            self._shadow.begin()
        while True:
            for token in gained:
                finish = self._finish(request, token)
                step = step_of(request, token, finish)
                if finish is not None:
                    decode_s = runtime.perf_counter() - first - shadow_wait_s
                    lost_s = self.engine.pace.lost_s - lost_before
                    return step, finish, Times(first - began, decode_s, shadow_wait_s, longest_s, carried, lost_s)
                shown = runtime.perf_counter()
                yield step
                self.engine.pace.on_paused(number, runtime.perf_counter() - shown)
            if len(sequence.tokens) == 1 and self._shadow is not None:
                waited = runtime.perf_counter()
                self._shadow.wait(self.launch_s, request.cancelled)
                last = runtime.perf_counter()
                shadow_wait_s = last - waited
                self.engine.pace.on_paused(number, shadow_wait_s)
            gained = self._decode(request, gained)
            now = runtime.perf_counter()
            longest_s, last = max(longest_s, now - last), now

    def _decode(self, request: Request, gained: tuple[int, ...]) -> tuple[int, ...]:
        """A decoding pass. `gained`: by the pass before. It reads the last of these tokens, and drafts of the next."""
        sequence, number = request.sequence, request.number
        count = len(sequence.tokens)
        position = len(sequence.prompt) + count - 1
        self.engine.pace.on_decoded(number)
        ahead, is_right = request.drafts.on_decoded(gained) if request.drafts is not None else (0, None)
        self.engine.post(t.TokenDecoded(number, count - 1, ahead, is_right))
        tokens = [*sequence.prompt, *sequence.tokens] if self._own_path.asks else []
        if self._own_path.reads_again(tokens, 1, sequence.cache):
            request.read_again += 1
            with sequence.reading_again(family.new_cache(self.model.config)):
                return self._read(request, tokens, 0, prefill=True)
        most = sequence.max_new_tokens - count
        drafts: tuple[int, ...] = ()
        if request.drafts is not None:
            drafts = self.engine.pace.next_pass(number, partial(request.drafts.take, most))
        if self._own_path.asks:
            drafts = self._own_path.until_again(tokens, drafts, sequence.cache)
        found = self._read(request, [sequence.tokens[-1], *drafts], position, prefill=False)
        request.drafted += len(drafts)
        return found

    def _read_prompt(self, request: Request) -> tuple[int, ...]:
        """All of it, or what is not kept of it. Returns the next token."""
        with self.kept.reading(request) if self.kept.is_on else contextlib.nullcontext() as reading:
            at = request.cached_tokens
            self.engine.on_prefix_found(at)
            return self._read(request, request.sequence.prompt[at:], at, prefill=True, reading=reading)

    def _read(
        self, request: Request, tokens: list[int], position: int, prefill: bool, reading: PrefixReading | None = None
    ) -> tuple[int, ...]:
        """Read tokens, the first of them at `position`, in one pass; a prompt perhaps in several. Returns the next
        token; after a token with drafts, one more for each draft that was right."""
        gained: tuple[int, ...] = ()
        while not gained:
            job = self._job(request, tokens, position, prefill, reading)
            gained = self.steps.run(job)
            request.prefill_passes += prefill and not request.sequence.tokens
            request.chunked |= reading is None and job.one.tokens < len(tokens)
            request.steps += 1
            request.passes += job.shared
            request.rounded |= job.rounded
            tokens, position = tokens[job.one.tokens :], position + job.one.tokens
            if reading is not None:
                reading.on_read(None if request.rounded else request.sequence.cache, position)
        return gained

    def _job(
        self, request: Request, tokens: list[int], position: int, prefill: bool, reading: PrefixReading | None
    ) -> PassJob:
        """A pass over `tokens`, or over the first of them; the first is at `position`."""
        visit = t.Visit(request.number, position, 0)
        memory: PassMemory | None = None
        in_block = len(tokens) > 1 and not prefill
        most, sizes = len(tokens), Sizes(0, 0)
        if reading is not None:
            sizes, most = self.kept.sizes(reading), min(most, self.kept.most_tokens(request, reading))
        current = Current(visit, request.sequence.cache, in_block, request.unread_scores)

        def enter(one: t.Pass) -> None:
            nonlocal memory
            if memory is None and self.experts.watch is not None:
                memory = PassMemory(final=one.tokens == len(tokens), last_rows=request.last_rows)
            current.in_block = in_block or 0 < sizes.block < one.tokens
            current.whole = position + len(tokens) if one.tokens < len(tokens) else 0
            self._enter(current, memory)

        def forward(one: t.Pass) -> tuple[int, ...]:
            if in_block:
                gained = self._forward_block(request, tokens, visit)
            elif 0 < sizes.block < one.tokens:
                gained = self._forward_chunks(request, tokens[: one.tokens], visit, sizes, one.tokens == len(tokens))
            else:
                gained = self._forward(request, tokens[: one.tokens], last=one.tokens == len(tokens))
            states = current.states[: len(gained)] if in_block else current.states
            self.drafting.on_read(request, position, states, gained)
            return gained

        return PassJob(request, position, most, prefill, forward, enter)

    def _report(self, request: Request, times: Times, finish: str, complete: bool) -> Report:
        weights, experts = self.weight_bytes, self.store.manifest.expert_bytes
        memory = MainMemory(self.device_bytes, weights, self._predictor_bytes, experts)
        kernel = self.kernel
        changes = [*changed_weights(self.store.manifest), *self._own_path.unfollowed, *self._rotary.unfollowed]
        report = build_report(self.engine, request, memory, times, finish, kernel, complete, self.device_text, changes)
        self.kept.on_ended(request)
        return report

    def _finish(self, request: Request, token: int) -> str | None:
        """Append a token to the answer. Returns `Report.finish` if the answer ends there, else None."""
        tokens = request.sequence.tokens
        tokens.append(token)
        if token in request.chooser.last_tokens or len(tokens) == request.chooser.complete_at:
            return "stop"
        if request.stopped is not None and request.stopped(token):
            return "stop_text"
        if len(request.sequence.prompt) + len(tokens) >= self.shape.context:
            return "context"
        return "length" if len(tokens) >= request.sequence.max_new_tokens else None

    def _forward(self, request: Request, tokens: list[int], last: bool) -> tuple[int, ...]:
        """One pass over `tokens`. Returns the next token; none where these are not the `last` ones so far."""
        with contextlib.nullcontext() if self._batched else at_once():
            logits = self._logits(tokens, request.sequence.cache, last)
        scores = request.unread_scores
        if scores is not None:
            with self._explaining_faults(request):
                scores.read(self._output_layer, request.check_wanted)
        gained = tuple(self._choose(request, row) for row in logits)
        self.engine.spans.end_pass(request.number)
        return gained

    def _forward_block(self, request: Request, tokens: list[int], visit: t.Visit) -> tuple[int, ...]:
        """One pass over a token and drafts of the next ones. Returns the tokens that follow as far as the drafts are
        right, and the one after them."""

        def experts(layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.experts.compute(visit._replace(layer=layer), hidden, index, weights, is_block=True)

        def forward(token: int, cache: Any) -> torch.Tensor:
            return self._logits([token], cache)[0]

        block = Block(forward, tokens, request.sequence.cache, visit.position, experts)
        gained: list[int] = []
        before = request.accepted
        for logits, draft in zip(block.run(), [*tokens[1:], None], strict=True):
            gained.append(self._choose(request, logits))
            request.accepted += gained[-1] == draft
            if gained[-1] != draft or draft in request.chooser.last_tokens or request.chooser.complete_at is not None:
                break
        self._note_cache_bytes(block.nbytes)
        block.cut(len(gained))
        drafts = request.drafts
        if drafts is not None:
            drafts.on_verified(len(gained))
        self.engine.on_verified(len(tokens) - 1, request.accepted - before)
        self.engine.spans.end_pass(request.number)
        return tuple(gained)

    def _forward_chunks(
        self, request: Request, tokens: list[int], visit: t.Visit, sizes: Sizes, last: bool
    ) -> tuple[int, ...]:
        """As `_forward`, in chunks that share each layer's experts."""

        def experts(layer: int, *rows: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
            hidden, index, weights = rows
            return self.experts.compute(visit._replace(layer=layer), hidden, index, weights, chunks=chunks)

        logits = Chunks(self._logits, tokens, request.sequence.cache, visit.position, sizes, experts, last).run()
        gained = tuple(self._choose(request, row) for row in logits)
        self.engine.spans.end_pass(request.number)
        return gained

    def _logits(self, tokens: list[int], cache: Any, last: bool = True) -> torch.Tensor:
        """Read `tokens`. The logits of the token after them, if they are the `last` ones: [1 or 0, V], float32. The
        model's head is as large as many layers, and nobody asks what follows the other ones."""
        ids, keep = token_ids(tokens, self.device), 1 if last else torch.empty(0, dtype=torch.long, device=self.device)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return out.logits[0].float()  # type: ignore[no-any-return]

    def _choose(self, request: Request, logits: torch.Tensor) -> int:
        if self.on_logits is not None:
            self.on_logits(request.number, to_host(logits)[0])
        if request.has_unusable_output:
            self.engine.checks.settle_unusable(request)
            self.engine.check(request.number)
        with self._explaining_faults(request):
            return request.chooser.choose(logits)

    @contextlib.contextmanager
    def _explaining_faults(self, request: Request) -> Iterator[None]:
        """Where logits are not finite, by a worker's fault or the model's own: AnswerWithdrawnError for the former."""
        try:
            yield
        except NonFiniteError:
            self.engine.checks.explain(request.number)
            self.engine.check(request.number)
            raise

    def _note_cache_bytes(self, beside: int = 0) -> None:
        """The caches of open requests take most when one of these ends, or at the end of a block, which keeps bytes
        `beside` them."""
        held = beside + self.kept.nbytes
        for request in self.admission.requests():
            held += request.sequence.cache_bytes()
            if (drafts := request.drafts) is not None:
                held += drafts.nbytes
        with self._noting:
            self._cache_bytes_max = max(self._cache_bytes_max, held)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights (a predictor's too), buffers, and the most that the KV caches of open requests took."""
        self._note_cache_bytes()
        return self.weight_bytes + self._cache_bytes_max + self._predictor_bytes

    @property
    def _predictor_bytes(self) -> int:
        """Of what predicts experts, and of the head that drafts tokens."""
        of_head = held_bytes(self._head.modules) if self._head is not None else 0
        return of_head + (self.experts.watch.nbytes if self.experts.watch is not None else 0)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights and buffers."""
        return held_bytes(self.model)

    def close(self) -> None:
        self._loops.close()
        self.steps.close()
        self.engine.close()
        self.steps.join()
        self.kept.close()


def _device_name(device: torch.device) -> str:
    return processor_name() if device.type == "cpu" else accelerator_name(device)
