"""All errors that a user can meet, in one tree.

    ODMoEError
    ├── ConfigError              a flag, a cluster file or a secret is not valid
    ├── DoesNotFitError          a machine, or the machines of a plan, have too little memory for the model
    ├── SimulationError          a process that simulates was killed, or a policy of your own has failed
    ├── CheckpointError          the model directory itself
    │   ├── NotMoEError              no experts, or none that can be separated
    │   ├── UnsupportedFamilyError   it has experts, but this kind of model cannot run
    │   ├── UnsupportedFormatError   its weights are quantised in a way that cannot be read
    │   ├── NoTokenizerError         it has none, and a prompt is given as text
    │   ├── MissingShardError        the index names a file that is not there
    │   └── CorruptCheckpointError   truncated, or its bytes are not those it was published with
    ├── StoreError               the expert store
    │   ├── StoreNotFoundError
    │   ├── StoreMismatchError       another model's, another dtype's or another version's
    │   ├── CorruptStoreError        truncated, or a checksum is wrong
    │   ├── StoreWriteError          target not writable, disk full
    │   └── NotHeldError             an expert of another host's part
    ├── RequestError             one request is wrong or was stopped; the cluster is not affected
    │   ├── PromptError              empty, or past the model's context
    │   │   └── PromptTooLongError       the latter
    │   ├── PromptsFailedError       of several prompts, some have no answer; each one's error was given before
    │   ├── QueueFullError           too many requests are open and waiting already
    │   ├── RequestFailedError       no worker could serve it
    │   │   ├── NonFiniteError           the model's logits are not finite
    │   │   ├── AnswerWithdrawnError     a worker that computed for it has given wrong outputs
    │   │   └── AnswerChangedError       sent again, it has other tokens than before
    │   └── RequestCancelledError    cancelled by the client
    └── ClusterError             nodes and the links between them
        ├── LaunchError              a node did not come up
        │   └── HostError                its machine: not reached by ssh, wrong Python, no store, other code
        ├── HandshakeError           two nodes do not belong together
        │   ├── SecretError              the cluster's secret is missing or wrong
        │   ├── CertificateError         expired, another cluster's, host's or role's, or not to be read
        │   ├── VersionError             the nodes speak different versions of the protocol
        │   ├── ModelMismatchError       the nodes have stores of different models or dtypes
        │   └── OtherMainNodeError       the node serves another main node
        ├── LinkError                a stream broke, or a peer is gone
        │   └── MainNodeLostError        the main node's process is gone
        ├── ProtocolError            a message that is malformed, too large or out of turn
        ├── WrongOutputError         a worker's output is not what its expert computes
        └── DeadlineError            a peer did not answer in time

Each message says what was wrong, with which value, and what to do about it. It is shown on one line, escaped and
bounded, since parts of it may come from others: a peer, a client, a checkpoint, a host.
"""

from __future__ import annotations

from scheduler.one_line import one_line


class ODMoEError(Exception):
    """Root of the tree."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(ODMoEError):
    """A setting is not valid. The message has its name, its value and what is allowed."""


class DoesNotFitError(ODMoEError):
    """This machine, or the machines of a plan, have too little memory for the model."""


class SimulationError(ODMoEError):
    """A process that simulates for a plan was killed, or a policy from a file has failed."""


class CheckpointError(ODMoEError):
    """The Hugging Face model directory cannot be used."""


class NotMoEError(CheckpointError):
    """The model has no experts that Transformers dispatches through its ExpertsInterface."""


class UnsupportedFamilyError(CheckpointError):
    """This kind of model cannot run: it is not a decoder-only language model, or its cache has an unknown format."""


class UnsupportedFormatError(CheckpointError):
    """The weights are published in a format that cannot be read."""


class NoTokenizerError(CheckpointError):
    """The model, or the store made from it, has no tokenizer, which a prompt of text needs."""


class MissingShardError(CheckpointError):
    """A weight file, or the configuration, is not in the model directory."""


class CorruptCheckpointError(CheckpointError):
    """A weight file is truncated or its bytes have changed."""


class StoreError(ODMoEError):
    """The expert store cannot be used."""


class StoreNotFoundError(StoreError):
    """There is no finished store at this path."""


class StoreMismatchError(StoreError):
    """The store belongs to another model, dtype or format version."""


class CorruptStoreError(StoreError):
    """The store is truncated, or a blob's checksum differs from the manifest's."""


class StoreWriteError(StoreError):
    """The store could not be written."""


class NotHeldError(StoreError):
    """The store is a part of one, and this expert's bytes are in others."""


class RequestError(ODMoEError):
    """One request is wrong or was stopped; others go on."""


class PromptError(RequestError):
    """The prompt is empty or does not fit the model's context."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room for an answer in the model's context."""

    tokens: int | None = None
    """Of the prompt; at least so many where `is_least`. None: not known here."""
    context: int | None = None
    is_least = False

    @classmethod
    def of(cls, text: str, tokens: int, context: int, is_least: bool = False) -> PromptTooLongError:
        """With its numbers, which messages between nodes do not carry."""
        error = cls(text)
        error.tokens, error.context, error.is_least = tokens, context, is_least
        return error


class PromptsFailedError(RequestError):
    """Of several prompts, some have no answer. The error of each was given in its place."""


class QueueFullError(RequestError):
    """As many requests are answered and waiting as the cluster was started for."""


class RequestFailedError(RequestError):
    """The request could not be finished by any worker."""


class NonFiniteError(RequestFailedError):
    """The logits of a token are not finite, so that no token can be chosen."""


class AnswerWithdrawnError(RequestFailedError):
    """A worker that has computed for this request was found to give wrong outputs: its tokens may be wrong."""


class AnswerChangedError(RequestFailedError):
    """The request was sent again after the main node was lost, and its answer has other tokens than before."""


class RequestCancelledError(RequestError):
    """The client cancelled the request."""


class ClusterError(ODMoEError):
    """An error of the nodes or of the links between them."""


class LaunchError(ClusterError):
    """A node did not start."""


class HostError(LaunchError):
    """A machine of the cluster cannot be reached, or is not fit for its node."""


class HandshakeError(ClusterError):
    """Two nodes do not belong together: secret, certificate, protocol version, model or main node."""


class SecretError(HandshakeError):
    """The cluster's secret is missing or wrong."""


class CertificateError(HandshakeError):
    """A certificate has expired, is another cluster's, host's or role's, or its files cannot be used."""


class VersionError(HandshakeError):
    """Two nodes speak different versions of the protocol."""


class ModelMismatchError(HandshakeError):
    """Two nodes have stores of different models or dtypes."""


class OtherMainNodeError(HandshakeError):
    """The node serves another main node, which is alive."""


class LinkError(ClusterError):
    """The stream to a peer is broken or closed."""


class MainNodeLostError(LinkError):
    """The process of the main node is gone, or is just being started again."""


class ProtocolError(ClusterError):
    """A message is malformed, too large or out of turn."""


class WrongOutputError(ClusterError):
    """A worker's output is not finite, fails its checksum, or differs from what others compute."""


class DeadlineError(ClusterError):
    """A peer did not answer in time."""
