"""Loading a model: weights, tokenizer, default sampling and end tokens, whatever the form.

One load at a time in a process, and none that another thread would notice.  What
transformers does while it builds a model is mostly invisible to a thread that runs
another one: it patches `torch.linspace` to the device that it has anyway, and classes
of its own that only loading uses.  One thing is not: it sets torch's default dtype,
which is the process's.  `_dtype_of_this_thread` has it say so to this thread alone.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trio_llm.config import EngineSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.errors import ConfigurationError, ModelLoadError, ModelNotSupported
from trio_llm.models.catalogue import CATALOGUE, resolve

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOAD_LOCK = threading.Lock()

_NO_LIMIT = 1 << 30
"""Tokenizers that know no length say 10**30."""


@attrs.frozen(kw_only=True)
class LoadedModel:
    """A model ready to run."""

    name: str
    """Catalogue name, name of the directory or file, or hub name."""
    model: PreTrainedModel
    """In eval mode, on its device, in its dtype; nothing in it wants a gradient."""
    tokenizer: PreTrainedTokenizerBase
    defaults: SamplingParams
    """What the model's generation_config, or the catalogue, recommends; None where it says nothing."""
    eos_token_ids: frozenset[int]
    """Tokens after which a choice has ended."""
    max_model_len: int
    """The model's own limit, prompt and output together."""
    load_seconds: float
    """Without the imports."""
    is_quantized: bool = False
    """The weights were rounded to a few bits already, in the file that they come from."""
    import_seconds: float = 0.0
    """Of torch and transformers; next to nothing if the process had them already."""
    """Without torch and transformers' import, and without a download from the catalogue."""


def load_model(reference: str, *, settings: EngineSettings | None = None) -> LoadedModel:
    """Load a model and everything that belongs to it.  Call it in a worker thread.

    Args:
        reference: a catalogue name (fetched if need be), a Hugging Face directory or
            hub name, or a .gguf file.
        settings: device, dtype, revision and trust_remote_code are used.

    Raises:
        ModelLoadError: it cannot be found, fetched, read or held.
        ModelNotSupported: of an architecture or variant that would run wrongly.
        ConfigurationError: device or dtype cannot be had here.
    """
    settings = settings or EngineSettings()
    import_seconds = import_libraries()
    device = resolve_device(settings)
    dtype = resolve_dtype(settings, device)
    source = resolve(reference)
    with loading(reference, source):
        start = time.monotonic()
        if isinstance(source, Path) and source.is_file():
            model, tokenizer, end_tokens, is_quantized = _load_gguf(source, dtype)
        else:
            model, tokenizer, end_tokens, is_quantized = _load_pretrained(str(source), dtype, settings)
        model.to(device).eval().requires_grad_(False)
        return LoadedModel(
            name=name_of(reference, source),
            model=model,
            tokenizer=tokenizer,
            defaults=CATALOGUE[reference].defaults if reference in CATALOGUE else _defaults(model),
            eos_token_ids=_end_tokens(model, tokenizer) | end_tokens,
            max_model_len=_max_model_len(model, tokenizer, settings),
            load_seconds=time.monotonic() - start,
            import_seconds=import_seconds,
            is_quantized=is_quantized,
        )


@contextmanager
def loading(reference: str, source: Path | str) -> Iterator[None]:
    """What every load happens in: one at a time, quietly, and what fails in it is told as a ModelLoadError."""
    with _LOAD_LOCK, _quiet_transformers(), _dtype_of_this_thread():
        try:
            yield
        except (ModelLoadError, ConfigurationError):
            raise
        except Exception as error:  # transformers and torch raise all kinds
            either = "" if isinstance(source, Path) else " (and there is no such directory here)"
            raise ModelLoadError(f"{reference} cannot be loaded{either}: {_reason(error)}", field="model") from error


def import_libraries() -> float:
    """Import what every load needs; gives the seconds that it took."""
    start = time.monotonic()
    for name in ("transformers.models.auto.modeling_auto", "transformers.modeling_utils"):
        importlib.import_module(name)
    return time.monotonic() - start


def resolve_device(settings: EngineSettings) -> torch.device:
    """The device that `settings.device` means here.

    Raises:
        ConfigurationError: there is no such device.
    """
    import torch

    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        message = f"device {settings.device!r} is not available: {_reason(error)}"
        raise ConfigurationError(message, field="device") from error
    return device


def resolve_dtype(settings: EngineSettings, device: torch.device) -> torch.dtype:
    """The dtype that `settings.dtype` means on `device`.

    On CPUs it is float32: without AVX-512 a bfloat16 product takes several times as long.
    """
    import torch

    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


_Parts = tuple[Any, "PreTrainedTokenizerBase", frozenset[int], bool]
"""Model, tokenizer, end tokens that only the file knows, whether the weights are quantised.  transformers' types of
models are too narrow to use."""


def _load_gguf(path: Path, dtype: torch.dtype) -> _Parts:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from trio_llm.models.gguf import GGUFFile
    from trio_llm.models.gguf_architectures import build_config, read_weights, rope_factors
    from trio_llm.models.gguf_tokenizer import build_tokenizer, end_token_ids

    with GGUFFile(path) as file:
        config = build_config(file)
        tokenizer = build_tokenizer(file.metadata)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        weights = read_weights(file, config, dtype)
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
        check_complete(report)
        factors = rope_factors(file)
        if factors is not None:
            model.model.rotary_emb.inv_freq /= factors
            model.model.rotary_emb.original_inv_freq /= factors
        is_quantized = any(info.type.block_size > 1 for info in file.tensors.values())
        return model, tokenizer, end_token_ids(file.metadata), is_quantized


def _load_pretrained(name: str, dtype: torch.dtype, settings: EngineSettings) -> _Parts:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    AutoConfig.from_pretrained(name, **options)  # first, because its errors say best what is wrong with `name`
    tokenizer = load_tokenizer(name, options)
    auto_class: Any = AutoModelForCausalLM
    model, report = auto_class.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    check_complete(report)
    return model, tokenizer, frozenset(), False


def load_tokenizer(name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub name.

    Raises:
        ModelLoadError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        raise ModelLoadError(f"{name} has no tokenizer that can be loaded: {_reason(error)}", field="model") from error
    return tokenizer


def _reason(error: Exception) -> str:
    """What an error of transformers or torch says first; what follows is advice and traces."""
    return str(error).strip().partition("\n")[0].rstrip(": ") or type(error).__name__


def check_complete(report: dict[str, Any]) -> None:
    """Refuse a model of which a part would be random."""
    missing = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"weights are missing or have the wrong shape: {missing[0]}{others}")


def name_of(reference: str, source: Path | str) -> str:
    if reference in CATALOGUE or isinstance(source, str):
        return reference
    return source.stem if source.is_file() else source.resolve().name


def _defaults(model: Any) -> SamplingParams:
    """Sampling as generation_config recommends it.

    Its numbers count only where it wants sampling at all; where it says outright that
    it does not, greedy is the recommendation.
    """
    config = model.generation_config
    if config is None:
        return SamplingParams()
    repetition_penalty = getattr(config, "repetition_penalty", None)  # with or without sampling
    if not config.do_sample:
        temperature = None if config.do_sample is None else 0.0
        return SamplingParams(temperature=temperature, repetition_penalty=repetition_penalty)
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=getattr(config, "min_p", None),
        typical_p=getattr(config, "typical_p", None),
        repetition_penalty=repetition_penalty,
    )


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The union of what the three places say: each of them is wrong in some published model."""
    text_config = model.config.get_text_config()
    found: set[int] = set()
    for holder in (model.generation_config, text_config, model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def _max_model_len(model: Any, tokenizer: PreTrainedTokenizerBase, settings: EngineSettings) -> int:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is None and tokenizer.model_max_length < _NO_LIMIT:
        length = int(tokenizer.model_max_length)
    length = length or settings.max_model_len
    if length is None:
        raise ModelNotSupported("the model states no context length; set max_model_len", field="max_model_len")
    return int(length)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers; what matters here is raised."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _dtype_of_this_thread() -> Iterator[None]:
    """Have transformers build models in a dtype without setting torch's default dtype.

    transformers sets the default through one function.  While this context is open, and
    for this thread only, that function puts a torch function mode in its place: modes
    belong to a thread, and this one gives the dtype to the factories that parameters
    and buffers come from.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import modeling_utils

    factories = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
    fills = {torch.tensor, torch.full}  # of the default dtype only when given a Python float

    class DefaultDtype(TorchFunctionMode):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            of_default_dtype = func in factories or (func in fills and args and isinstance(args[-1], float))
            if of_default_dtype and kwargs.get("dtype") is None:
                kwargs = kwargs | {"dtype": self.dtype}
            return func(*args, **kwargs)

    original = modeling_utils.local_torch_dtype
    loader = threading.get_ident()

    @contextmanager
    def local_torch_dtype(dtype: torch.dtype, model_class_name: str | None = None) -> Iterator[None]:
        if threading.get_ident() != loader:
            with original(dtype, model_class_name):
                yield
        else:
            with DefaultDtype(dtype):
                yield

    modeling_utils.local_torch_dtype = local_torch_dtype
    try:
        yield
    finally:
        modeling_utils.local_torch_dtype = original
