"""Layer visits and their demands: how they are made, and when they are due."""

from __future__ import annotations

from scheduler import types as t
from scheduler.core.commands import Commands
from scheduler.core.state import Demand, LayerVisit, Origin, Request, State


class VisitTable:
    """Makes what `State.visits` holds."""

    def __init__(self, state: State, commands: Commands) -> None:
        self.ordinal = {layer: ordinal for ordinal, layer in enumerate(state.shape.layers)}
        """Layer -> its number among the MoE layers."""
        self._state = state
        self._commands = commands

    def open(self, request: Request, visit: t.Visit) -> LayerVisit:
        """The visit, made if it is not there. A warm-up has layer -1."""
        opened = self._state.visits.get(visit)
        if opened is None:
            turn = visit.position * len(self.ordinal) + self.ordinal.get(visit.layer, 0)
            opened = self._state.visits[visit] = LayerVisit(visit, request, turn, self.due(request, visit))
        return opened

    def due(self, request: Request, visit: t.Visit) -> int:
        """See `LayerVisit.due`. `visit`: of the pass under way, or of a row after it; -1 for a warm-up."""
        ordinal = self.ordinal.get(visit.layer)
        if ordinal is None:
            return -1
        step = self._state.step.number
        if visit.position != request.position:
            step = request.step_of(visit.position)
        return step * len(self.ordinal) + ordinal

    def demand(self, opened: LayerVisit, expert: int, origin: Origin) -> Demand:
        """A new demand of the visit."""
        identity = t.ExpertId(opened.id.layer, expert)
        demand = opened.demands[expert] = Demand(self._commands.next_id(), opened, identity, origin)
        return demand
