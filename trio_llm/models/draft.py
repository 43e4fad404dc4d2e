"""Loading the model that guesses for another: it must speak the other's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_llm.config import EngineSettings
from trio_llm.errors import ConfigurationError, ModelLoadError
from trio_llm.models.loader import LoadedModel, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_draft_model(target: LoadedModel, settings: EngineSettings) -> LoadedModel:
    """Load `settings.speculative_model` to guess for `target`.  Call it in a worker thread.

    Raises:
        ConfigurationError: the setting is missing, or the two have different vocabularies.
        ModelLoadError: it cannot be found, fetched, read or held.
    """
    reference = settings.speculative_model
    if not reference:
        raise ConfigurationError("speculative_model says which draft model, and is not set", field="speculative_model")
    try:
        # a revision is the target's own
        draft = load_model(reference, settings=attrs.evolve(settings, revision=None))
    except ModelLoadError as error:
        raise type(error)(f"draft model: {error.message}", field="speculative_model", **error.details) from error
    check_same_vocabulary(target, draft)
    return draft


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Compare two tokenizers, special and added tokens included: each id must be the same token in both.

    Up to the size of the smaller, that is: the larger may be padded.

    Raises:
        ConfigurationError: they differ.
    """
    ours, theirs = _tokens(target.tokenizer), _tokens(draft.tokenizer)
    size = min(max(ours, default=-1), max(theirs, default=-1)) + 1
    different = [token_id for token_id in range(size) if ours.get(token_id) != theirs.get(token_id)]
    if different:
        first = different[0]
        raise ConfigurationError(
            f"the draft model {draft.name} has another vocabulary than {target.name}: {len(different)} of {size} "
            f"tokens differ, the first is {first}, {theirs.get(first)!r} and not {ours.get(first)!r}",
            field="speculative_model",
        )


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
