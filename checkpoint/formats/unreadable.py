"""The error for parts of a checkpoint whose reading has failed with one of Python, torch or Transformers."""

from __future__ import annotations

import errno

from scheduler.errors import CheckpointError, CorruptCheckpointError, DoesNotFitError

DAMAGED = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What Python raises for settings and parts of other kinds than a format has. Another version of a library may raise
the same."""
REMEDY = "fetch it again, or, if it is whole, install the versions of libraries that pyproject.toml names"
_NO_MEMORY = ("can't allocate memory", "not enough memory")
"""Of torch's allocator for a processor, which raises RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small, of this machine or of an accelerator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    import torch  # a wrong path is answered without it

    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


def unreadable(
    what: str, error: Exception, kind: type[CheckpointError] = CorruptCheckpointError
) -> CheckpointError | DoesNotFitError:
    """The error to raise from `error`. `what`: the file, the part, and what could not be done with it."""
    reason = first_line(error)
    if is_out_of_memory(error):
        return DoesNotFitError(f"{what}: too little memory ({reason}); end other programs, or use a larger machine")
    return kind(f"{what}: {reason}; {REMEDY}")


def first_line(error: BaseException) -> str:
    """An error's cause, with the class where the words alone would not tell it."""
    words = (str(error).splitlines() or [""])[0]
    if not words:
        return type(error).__name__
    return words if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {words}"
