"""Every output of a worker is checked before it counts, and some are checked again; what follows from a wrong one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from checkpoint.devices.transfer import to_host
from main_node.checks.arbiter import Arbiter
from main_node.checks.audits import MOST_BYTES, SMALLER, Case, agree, in_doubt, liars
from main_node.checks.outputs import gains, grew_less, is_finite, is_intact, is_usable, read_output
from main_node.checks.suspects import Source
from main_node.checks.verification import Verification
from main_node.engine.layer import LayerWork
from main_node.engine.peers import Peers
from main_node.request import Request
from scheduler import types as t
from scheduler.errors import ODMoEError, ProtocolError
from wire import messages as w
from wire import runtime

NOT_FINITE, DAMAGED = "not finite", "with a wrong checksum"
"""Faults of outputs that may be accidents. Not finite: an element, or the norm."""
UNTRUSTED = "though it is not trusted any more"
LARGE_GAIN = 100.0
"""An output that is so many times as long as its input is compared at once with what the main node computes."""
FAR = 10.0
"""Times an output's own length; a difference above it is not printed."""
SETTLE_S, UNUSABLE_S = 5.0, 30.0
"""Longest waits for the arbiter: of an answer's report, and of a token for outputs that are not finite."""

_log = logging.getLogger(__name__)


class OutputChecks:
    """`requests`: those that are open. `changed`: the engine's lock, which is held wherever nothing else is said.
    `withdraw(request, why)`: called for open requests whose answers have an output of a worker that was found to lie.
    """

    def __init__(
        self,
        requests: Mapping[int, Request],
        peers: Peers,
        changed: runtime.Condition,
        withdraw: Callable[[int, str], None],
        verification: Verification,
    ) -> None:
        self.audits = verification.audits
        self.computations = 0
        """Whose outputs were taken, without audits."""
        self._arbiter = verification.arbiter
        self._requests = requests
        self._peers = peers
        self._changed = changed
        self._withdraw = withdraw
        self._disputes: dict[Case, set[Source]] = {}
        """Waiting for the arbiter -> workers of which at least one gave a wrong output."""
        self._usual_gain = LARGE_GAIN
        """Rows that grow more are compared at once. Grows with rows that were found right."""
        self._smaller: set[tuple[int, int]] = set()
        """Worker and slot of experts in a smaller form."""
        self.on_wrong_outputs: Callable[[], None] = lambda: None
        """Called where outputs that were taken may be wrong, also those of requests that have ended."""

    # --- requests -----------------------------------------------------------------------------------------------

    def settle(self, request: int, within_s: float | None = None) -> bool:
        """Wait for the arbiter where it decides about a worker with an output in this answer. Whether the answer is
        free of doubt then. Called without the lock."""
        with self._changed:
            found = self._requests.get(request)
            if found is None:
                return True

            def is_settled() -> bool:
                return self._requests.get(request) is not found or not self._is_disputed(found)

            self._changed.wait_for(is_settled, SETTLE_S if within_s is None else within_s)
            return is_settled() and not found.is_doubted

    def settle_unusable(self, request: Request) -> None:
        """Before a token is chosen: wait for the arbiter about an output that is not finite. A norm can turn
        enormous rows into zeros, so the logits need not tell. Called without the lock."""
        request.has_unusable_output = False
        self.settle(request.number, UNUSABLE_S)

    def _is_disputed(self, request: Request) -> bool:
        return any(not request.sources.isdisjoint(sources) for sources in self._disputes.values())

    # --- outputs ------------------------------------------------------------------------------------------------

    def loads(self, command: t.Load) -> None:
        """An expert is loaded in some form."""
        if command.form:
            self._smaller.add((command.worker, command.slot))
        elif self._smaller:
            self._smaller.discard((command.worker, command.slot))

    def take(self, call: t.Compute, message: w.Computed, layer: LayerWork) -> str:
        """Check an output and add it to its layer. Returns its fault, or an empty text. Raises ProtocolError.

        Whose fault it is that an output is not finite is known once the same rows were computed a second time: the
        first worker's, or the expert's, which then computes that everywhere.
        """
        source = self._peers.suspects.source(call.worker)
        if source.proof:
            return UNTRUSTED
        hidden, weights = layer.rows_of(call)
        output = self._read(source, message, hidden, weights)
        if output is None:
            return DAMAGED
        request = self._requests.get(call.visit.request)
        before = layer.not_finite.pop((call.expert.expert, call.start), None)
        # A worker of this process leaves its outputs on an accelerator, where each look costs a wait: the logits tell.
        if not output.is_cpu or is_usable(output):
            if before is not None:
                self._mark(before, NOT_FINITE)
        elif before is not None:
            kept = output.clone()
            self._dispute(
                Case(
                    call.visit.request,
                    call.expert,
                    hidden.clone(),
                    weights.clone(),
                    {source: kept, before: kept},
                    layer.passes_of(call),
                )
            )
            if request is not None:
                request.has_unusable_output = True
        elif is_finite(hidden) and is_finite(weights):
            layer.not_finite[call.expert.expert, call.start] = source
            return NOT_FINITE
        if request is not None:
            request.sources.add(source)
        if output.is_cpu and request is not None:
            self._note_gain(call, request, hidden, weights, output)
        layer.keep(call, output)
        self.computations += 1
        return ""

    def _note_gain(
        self, call: t.Compute, request: Request, hidden: torch.Tensor, weights: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Keep each worker's row that grew most: if a request's logits are not finite, the arbiter looks at those."""
        source = self._peers.suspects.source(call.worker)
        if (call.worker, call.slot) in self._smaller:
            return
        kept = request.largest_gains
        if len(hidden) == 1 and source in kept and grew_less(output, hidden, kept[source][0]):
            return
        most, row = gains(output, hidden).nan_to_num(nan=0.0).max(0)  # NaN: a row of zeros of zeros
        gain, at = most.item(), int(row)
        if source in kept and gain <= kept[source][0]:
            return
        rows = slice(at, at + 1)
        outputs = {source: output[rows].clone()}
        case = Case(call.visit.request, call.expert, hidden[rows].clone(), weights[rows].clone(), outputs)
        kept[source] = gain, case
        if gain > self._usual_gain:
            self._arbitrate_alone(case)

    def _arbitrate_alone(self, case: Case) -> None:
        """One worker's output is to be compared with the main node's."""
        self._disputes[case] = set(case.outputs)
        if not self._arbitrate(case):
            del self._disputes[case]

    def explain(self, request: int) -> None:
        """A request's logits are not finite: was that a worker? Waits for the arbiter; an answer with an output of a
        worker that lied is withdrawn then. Called without the lock."""
        with self._changed:
            found = self._requests.get(request)
            if found is not None:
                suspects, found.largest_gains = found.largest_gains, {}
                for _, case in sorted(suspects.values(), key=lambda one: -one[0]):
                    self._arbitrate_alone(case)
        self.settle(request)

    def _read(
        self, source: Source, message: w.Computed, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """An output [n, H]; None for one that was damaged. Raises ProtocolError for one that is malformed."""
        try:
            output = read_output(message.output, hidden, weights)
        except ProtocolError as error:
            source.proof = source.proof or str(error)
            self._doubt({source})
            raise
        if is_intact(message):
            return output
        self._mark(source, DAMAGED)
        return None

    def _mark(self, source: Source, fault: str) -> None:
        if self._peers.suspects.mark(source, fault):
            self._doubt({source})
            self._drop(source)

    def _doubt(self, sources: set[Source]) -> None:
        """Answers with an output of one of them may be wrong."""
        if sources:
            self.on_wrong_outputs()
        for request in self._requests.values():
            request.is_doubted |= not request.sources.isdisjoint(sources)

    def _drop(self, source: Source) -> None:
        if self._peers.suspects.source(source.number) is source:  # else another process has come in its place
            self._peers.drop(source.number, source.error)

    # --- audits -------------------------------------------------------------------------------------------------

    def audit(self, call: t.Compute, layer: LayerWork) -> t.AuditRequested | None:
        """An output was taken: whether it is to be computed again."""
        if self.audits is None:
            return None
        source = self._peers.suspects.source(call.worker)
        if not self.audits.wants(source):
            return None
        if (call.worker, call.slot) in self._smaller:
            self.audits.missed[SMALLER] += 1
            return None
        hidden, weights, output = to_host(*layer.rows_of(call), layer.output_of(call))
        if not is_finite(output):
            return None
        number = self.audits.begin(call, source, hidden, weights, output, layer.passes_of(call))
        return None if number is None else t.AuditRequested(number, call.expert, call.stop - call.start, (call.worker,))

    def rows_of(self, command: t.Compute) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states [n, H] and routing weights [n] of an audit."""
        case = self.audits.case(-command.visit.request) if self.audits else None
        return None if case is None else (case.hidden, case.weights)

    def passes_of(self, command: t.Compute) -> tuple[int, ...]:
        """Of an audit's rows, see `w.Compute`."""
        case = self.audits.case(-command.visit.request) if self.audits else None
        return () if case is None else case.passes

    def on_dropped(self, command: t.AuditDropped) -> None:
        """No worker does it: where that has happened too often, the main node does."""
        if self.audits is None:
            return
        case = self.audits.case(command.audit)
        if case is not None and self.audits.impatient(case) and self._arbitrate(case):
            self.audits.end(command.audit, by_worker=False)
        else:
            self.audits.drop(command.audit)

    def take_audit(self, call: t.Compute, message: w.Computed) -> str:
        """Compare a second output with the first. Returns its own fault, or an empty text. Raises ProtocolError."""
        audit = -call.visit.request
        case = self.audits.case(audit) if self.audits is not None else None
        if self.audits is None or case is None:
            return ""
        source = self._peers.suspects.source(call.worker)
        output = self._read(source, message, case.hidden, case.weights)
        if output is None:
            return DAMAGED
        if not is_usable(output):
            self._mark(source, NOT_FINITE)
            return NOT_FINITE
        if (call.worker, call.slot) in self._smaller:
            self.audits.drop(audit, SMALLER)
            return ""
        self.audits.end(audit)
        both = replace(case, outputs={**case.outputs, source: output})
        if not agree(both):
            self._dispute(both)
        return ""

    # --- which of them is wrong ---------------------------------------------------------------------------------

    def _dispute(self, case: Case) -> None:
        """Two outputs cannot both be right."""
        sources = set(case.outputs)
        _log.warning(
            "outputs of expert %d of layer %d cannot both be right: %s",
            *reversed(case.expert),
            " and ".join(sorted(source.name for source in sources)),
        )
        self._disputes[case] = sources
        if not self._arbitrate(case):
            self._doubt(sources)
            del self._disputes[case]

    def _arbitrate(self, case: Case) -> bool:
        """False where there is nobody to decide."""
        arbiter = self._arbiter if case.nbytes <= MOST_BYTES else None
        return arbiter is not None and arbiter.submit(partial(self._judge, arbiter, case))

    def _judge(self, arbiter: Arbiter, case: Case) -> None:
        """On the arbiter's thread, without the lock."""
        truth: torch.Tensor | None = None
        found: dict[Source, float] = {}
        try:
            truth = arbiter.compute(case.expert, case.hidden, case.weights, case.passes)
            found = liars(case, truth, arbiter.arithmetic)
        except (ODMoEError, OSError, RuntimeError, MemoryError) as error:
            _log.warning("the main node cannot compute expert %d of layer %d: %s", *reversed(case.expert), error)
        with self._changed:
            for source, far in found.items():
                self._convict(source, case, far)
                self._drop(source)
            if truth is not None and not found and len(case.outputs) == 1:
                grown = gains(truth, case.hidden).nan_to_num(nan=0.0, posinf=0.0).max().item()
                self._usual_gain = max(self._usual_gain, 2 * grown)
            if self._disputes.pop(case, None) is not None:
                self._doubt(in_doubt(case, truth, arbiter.arithmetic) - found.keys())
            self._changed.notify_all()

    def _convict(self, source: Source, case: Case, far: float) -> None:
        layer, expert = case.expert
        what = f"differs by {far:.2%} from" if far <= FAR else "is far from"
        what = what if math.isfinite(far) else "is not finite, unlike"
        proof = f"that of expert {expert} of layer {layer} {what} what the main node computes"
        source.proof = source.proof or proof
        self.on_wrong_outputs()
        for number, request in list(self._requests.items()):
            request.is_doubted |= bool(request.cached_tokens)  # it may have found rows with outputs of this worker
            if source in request.sources:
                self._withdraw(number, str(source.error))
