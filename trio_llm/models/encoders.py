"""Embedding models: telling them from the others, and loading one with how it makes vectors.

What sentence-transformers writes beside a model says how its hidden states become a vector:
`modules.json` which steps there are, `1_Pooling/config.json` the pooling,
`sentence_bert_config.json` the longest text.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs

from trio_llm.config import EngineSettings
from trio_llm.errors import ConfigurationError, ModelLoadError, ModelNotSupported
from trio_llm.models.catalogue import resolve
from trio_llm.models.loader import (
    check_complete,
    import_libraries,
    load_tokenizer,
    loading,
    name_of,
    resolve_device,
    resolve_dtype,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Task = Literal["generate", "embed"]
PoolingMode = Literal["mean", "cls", "lasttoken"]

_POOLINGS: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "lasttoken",
}
"""By what the files call them: newer ones have the mode itself, older ones a flag for each."""


@attrs.frozen(kw_only=True)
class LoadedEncoder:
    """An embedding model ready to run."""

    name: str
    """Catalogue name, name of the directory, or hub name."""
    model: PreTrainedModel
    """Without a head, in eval mode, on its device, in its dtype."""
    tokenizer: PreTrainedTokenizerBase
    pooling: PoolingMode
    normalize: bool
    """Whether its vectors have length 1."""
    dimensions: frozenset[int] | None
    """Sizes that its vectors can be cut to; empty is none, None any."""
    max_model_len: int
    """Tokens of the longest text that it was made for."""
    max_positions: int
    """Tokens of the longest text that it could take."""
    load_seconds: float
    """Without the imports."""
    import_seconds: float = 0.0


def task_of(reference: str, *, settings: EngineSettings | None = None) -> Task:
    """What a model is for.  Call it in a worker thread: it may have to fetch the model's configuration.

    It is for embeddings if it comes with sentence-transformers' files, or without a head that could
    generate.  What cannot be found is "generate": loading it will say what is wrong.

    Raises:
        ModelLoadError: the reference means nothing, or could not be fetched.
    """
    source = resolve(reference)
    if isinstance(source, Path) and source.is_file():
        return "generate"
    files = _Files(source, settings or EngineSettings())
    if files.read("modules.json") is not None:
        return "embed"
    config = files.read("config.json") or {}
    architecture = str((config.get("architectures") or [""])[0])
    headless = architecture.endswith("Model") and not architecture.endswith(("LMHeadModel", "HeadsModel"))
    return "embed" if headless or architecture.endswith("ForMaskedLM") else "generate"


def load_encoder(reference: str, *, settings: EngineSettings | None = None) -> LoadedEncoder:
    """Load an embedding model and everything that belongs to it.  Call it in a worker thread.

    Args:
        reference: a catalogue name (fetched if need be), a Hugging Face directory or hub name.
        settings: device, dtype, revision, trust_remote_code and max_model_len are used.

    Raises:
        ModelLoadError: it cannot be found, fetched, read or held.
        ModelNotSupported: its vectors are made in a way that is not known here.
        ConfigurationError: device or dtype cannot be had here, or max_model_len is above what it can take.
    """
    settings = settings or EngineSettings()
    import_seconds = import_libraries()
    device = resolve_device(settings)
    dtype = resolve_dtype(settings, device)
    source = resolve(reference)
    if isinstance(source, Path) and source.is_file():
        raise ModelNotSupported(f"{reference} is a GGUF file; embedding models are read from directories")
    with loading(reference, source):
        from transformers import AutoConfig, AutoModel

        start = time.monotonic()
        files = _Files(source, settings)
        options: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        config = AutoConfig.from_pretrained(str(source), **options)
        tokenizer = load_tokenizer(str(source), options)
        pooling, normalize = _pooling(files)
        auto_class: Any = AutoModel
        model, report = auto_class.from_pretrained(str(source), dtype=dtype, output_loading_info=True, **options)
        # the pooler stands behind the hidden states, which are all that is used
        report["missing_keys"] = [key for key in report["missing_keys"] if "pooler" not in key.split(".")]
        check_complete(report)
        model.to(device).eval().requires_grad_(False)
        max_positions = _max_positions(model, tokenizer)
        return LoadedEncoder(
            name=name_of(reference, source),
            model=model,
            tokenizer=tokenizer,
            pooling=pooling,
            normalize=normalize,
            dimensions=_dimensions(config),
            max_model_len=_max_model_len(files, max_positions, settings),
            max_positions=max_positions,
            load_seconds=time.monotonic() - start,
            import_seconds=import_seconds,
        )


@attrs.frozen
class _Files:
    """The small files of a model, wherever it is."""

    source: Path | str
    settings: EngineSettings

    def read(self, name: str) -> Any:
        """What a JSON file holds; None if there is none."""
        try:
            path = self.source / name if isinstance(self.source, Path) else self._fetch(self.source, name)
            return None if path is None else json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ModelLoadError(f"{name} of {self.source} is not valid JSON: {error}", field="model") from None

    def _fetch(self, model: str, name: str) -> Path | None:
        from transformers.utils import cached_file

        found: str | None = cached_file(
            model,
            name,
            revision=self.settings.revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)


def _pooling(files: _Files) -> tuple[PoolingMode, bool]:
    """How vectors are made, and whether they are scaled to length 1.

    A model without sentence-transformers' files says neither: then it is what sentence-transformers
    does with such a model, the mean, and scaled, as OpenAI's vectors are.

    Raises:
        ModelNotSupported: there is a step, or a pooling, that is not known here.
    """
    modules = files.read("modules.json")
    if modules is None:
        return "mean", True
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    known = ["Transformer", "Pooling"]
    normalize = kinds == [*known, "Normalize"]
    if kinds[:1] != ["Transformer"] or (kinds != known and not normalize):
        raise ModelNotSupported(
            f"modules.json has the steps {', '.join(kinds)}; known are {', '.join(known)}, Normalize"
        )
    config = files.read(f"{modules[1].get('path', '1_Pooling')}/config.json") or {}
    modes = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    modes += [mode for mode, wanted in config.items() if mode.startswith("pooling_mode_") and wanted is True]
    found = [_POOLINGS[mode] for mode in modes if mode in _POOLINGS]
    if len(found) != 1 or len(modes) != 1:
        raise ModelNotSupported(
            f"its pooling is {' and '.join(map(str, modes)) or 'not stated'}; known is one of {', '.join(get_args(PoolingMode))}"
        )
    return found[0], normalize


def _dimensions(config: Any) -> frozenset[int] | None:
    """The sizes that a model trained for it (matryoshka) declares."""
    sizes = getattr(config, "matryoshka_dimensions", None)
    if sizes:
        return frozenset(int(size) for size in sizes)
    return None if getattr(config, "is_matryoshka", False) else frozenset()


def first_position(model: Any) -> int:
    """The position of a text's first token: RoBERTa and its kin leave the first ones to padding."""
    embeddings: Any = getattr(model, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0


def _max_positions(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    positions = getattr(model.config, "max_position_embeddings", None)
    return int(tokenizer.model_max_length) if positions is None else int(positions) - first_position(model)


def _max_model_len(files: _Files, max_positions: int, settings: EngineSettings) -> int:
    if settings.max_model_len is not None:
        if settings.max_model_len > max_positions:
            message = f"max_model_len is {settings.max_model_len}, but the model's context is {max_positions}"
            raise ConfigurationError(message, field="max_model_len")
        return settings.max_model_len
    stated = (files.read("sentence_bert_config.json") or {}).get("max_seq_length")
    return min(int(stated), max_positions) if stated else max_positions
