"""What the Hub answers, as errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scheduler.errors import CheckpointError, ConfigError


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Raises CheckpointError or ConfigError in place of the Hub's own errors. `name`: of the repository."""
    import httpx2
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise ConfigError(
            f"HF_HUB_OFFLINE is set, so {name} cannot be fetched; unset it, and run this again"
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{name!r} is no name of a Hub repository; give org/name, or demo") from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, and give a token of that account in "
            "HF_TOKEN or with hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no such revision; check --revision: a branch, a tag or a commit") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{constants.ENDPOINT} has no repository {name} that can be read; check the name; a private one needs a "
            "token in HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        raise CheckpointError(f"{constants.ENDPOINT} answers {status} for {name}; try again later") from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise CheckpointError(
            f"{constants.ENDPOINT} cannot be reached, or the connection broke ({error or type(error).__name__}); check "
            "the network and HF_ENDPOINT, and run this again: it goes on where it stopped"
        ) from error
