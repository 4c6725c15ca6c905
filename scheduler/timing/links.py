"""The time that messages take, the same in the simulator and in emulated runs.

Every node has a full-duplex link to one switch. All traffic shares the main node's link, so only that one is modelled:
a message occupies it for bytes / rate, first come first served, and arrives when its last byte has passed, at the
earliest one hop after it was sent. Alignments have a lane of their own: TCP shares a link between streams, and a few MB
of KV rows do not delay an embedding.
"""

from __future__ import annotations

import math

from scheduler.timing.profile import Profile


class Lane:
    """A queue that serves one message at a time, in the order of the calls. It only computes times; it does not
    wait."""

    def __init__(self) -> None:
        self.free = -math.inf

    def take(self, at: float, seconds: float) -> float:
        """Serve work that is ready at `at` and takes `seconds`. Returns its end."""
        self.free = free = (at if at > self.free else self.free) + seconds  # max() costs more than all the rest
        return free


class MainLinks:
    """The main node's link, out and in.

    `duplex`: both directions at once. Otherwise one lane serves both, as in a node that reads no answer before it has
    sent everything (the paper's prefill takes as long).
    """

    def __init__(self, profile: Profile, duplex: bool = True) -> None:
        self._hop_s, self._byte_s = profile.hop_s, 8 / profile.link_bits_per_s
        self._row_bytes, self._kv_bytes = profile.hidden_bytes, profile.kv_bytes
        self._state_bytes = profile.state_bytes
        self._out = Lane()
        self._in = Lane() if duplex else self._out
        self._aligning = Lane()

    def send_rows(self, at: float, rows: int) -> float:
        """The embeddings of `rows` tokens leave for a worker at `at`. Returns their arrival."""
        passed, earliest = self._out.take(at, rows * self._row_bytes * self._byte_s), at + self._hop_s
        return passed if passed > earliest else earliest

    def send_outputs(self, at: float, rows: int) -> float:
        """A worker's outputs for `rows` tokens leave at `at`. Returns their arrival."""
        passed, earliest = self._in.take(at, rows * self._row_bytes * self._byte_s), at + self._hop_s
        return passed if passed > earliest else earliest

    def send_alignment(self, at: float, rows: float, states: bool = False) -> float:
        """Keys and values of `rows` tokens, of one layer each, leave for the shadow at `at`, perhaps with the states.
        Returns their arrival."""
        nbytes = rows * self._kv_bytes + states * self._state_bytes
        passed = self._aligning.take(at, nbytes * self._byte_s)
        return max(passed, at + self._hop_s)

    def send_prediction(self, at: float) -> float:
        """A prediction leaves the shadow at `at`. Returns its arrival."""
        return at + self._hop_s
