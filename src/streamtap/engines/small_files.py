"""The files of a Hub model that say what it is: its config and tokenizer, without weights or torch."""

from __future__ import annotations

from streamtap.errors import InvalidInput, MissingExtra
from streamtap.settings import Settings

_PATTERNS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def fetch_small_files(name: str, revision: str | None, settings: Settings) -> None:
    """Put config and tokenizer of Hub model ``name`` into the Hub's own cache on this machine.

    Raises:
        InvalidInput: there is no such model or revision, no access to it, or no network.
        MissingExtra: the Hub's client is not installed.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingExtra(
            f"{name!r} is on the Hub, whose client is not installed: pip install 'streamtap[hub]'."
        ) from error
    try:
        snapshot_download(name, revision=revision, cache_dir=settings.hub_cache_dir, allow_patterns=list(_PATTERNS))
    except errors.GatedRepoError as error:
        raise InvalidInput(f"{name!r} needs access that this token does not have; ask for it on its page.") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise InvalidInput(
            f"the Hub has no model {name!r} with revision {revision or 'main'!r} that this token may see; check both."
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        raise InvalidInput(
            f"{name!r} is not on this machine and could not be fetched from the Hub "
            f"({type(error).__name__}); check the name and the network."
        ) from error
