"""From a loaded model to an EngineCore."""

from __future__ import annotations

import time

import structlog
import torch

from trio_llm.config import EngineSettings
from trio_llm.core.attention import AttentionBackend, SdpaBackend
from trio_llm.core.decode_graphs import can_record
from trio_llm.core.draft_model import DraftModel
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.exactness import ROW_MULTIPLE, batch_dependence, use_deterministic_experts
from trio_llm.core.kernels import Kernels, load
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.memory import num_kv_blocks
from trio_llm.core.model import PagedModel, num_probe_blocks
from trio_llm.core.packing import pack
from trio_llm.core.page_attention import PageBackend
from trio_llm.core.quantization import quantize
from trio_llm.core.speculation import speculation_for
from trio_llm.core.step_costs import StepCosts
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.core.varlen_attention import BLOCK_SIZE, VarlenBackend, can_attend, has_kernel
from trio_llm.errors import ConfigurationError
from trio_llm.models.loader import LoadedModel

logger = structlog.get_logger(__name__)


def build_core(loaded: LoadedModel, settings: EngineSettings, draft: LoadedModel | None = None) -> EngineCore:
    """Give a model pages, probe it and put an engine around it.

    Args:
        loaded: the model.
        settings: what the engine may use.
        draft: the model that guesses for it, if `speculative_method` is draft_model.

    Raises:
        ModelNotSupported: the architecture cannot run through paged attention, or runs wrongly.
        ConfigurationError: the KV memory is too small, max_model_len above the model's own, or int8 not to be had.
    """
    model = _paged(loaded, settings)
    max_model_len = settings.max_model_len or loaded.max_model_len
    if max_model_len > loaded.max_model_len:
        raise ConfigurationError(
            f"max_model_len is {max_model_len}, but the model's context is {loaded.max_model_len}",
            field="max_model_len",
        )
    draft_model = None if draft is None else _paged(draft, settings, beside=model)
    num_blocks = num_kv_blocks(
        # a block is one in the pages of both
        model.block_bytes + (0 if draft_model is None else draft_model.block_bytes),
        block_size=model.backend.block_size,
        device=model.device,
        settings=settings,
        max_model_len=max_model_len,
    )
    _allocate(loaded, settings, model, num_blocks, max_model_len)
    dependence = batch_dependence(model, num_blocks=num_blocks, max_rows=settings.max_num_batched_tokens)
    executor = TorchExecutor(model, num_blocks=num_blocks, max_model_len=max_model_len, batch_exact=dependence is None)
    if dependence is not None and settings.deterministic:
        logger.warning("deterministic, but results depend on the batch", model=loaded.name, reason=dependence)
    costs = StepCosts.measure(executor) if settings.speculative_method != "off" else None
    drafter = None
    if draft is not None and draft_model is not None:
        draft_len = min(max_model_len, draft.max_model_len)
        _allocate(draft, settings, draft_model, num_blocks, draft_len)
        guesser = TorchExecutor(
            draft_model, num_blocks=num_blocks, max_model_len=draft_len, vocab_size=model.vocab_size
        )
        drafter = DraftModel(
            guesser,
            vocab_size=draft_model.vocab_size,
            max_tokens=settings.max_num_batched_tokens,
            costs=StepCosts.measure(guesser),
        )
    speculation = speculation_for(settings, executor.info.vocab_size, costs, drafter)
    return EngineCore(executor, settings, speculation, clock=time.perf_counter)


def _paged(loaded: LoadedModel, settings: EngineSettings, *, beside: PagedModel | None = None) -> PagedModel:
    """Our attention in place of the model's own, with the blocks of the model that it is to run beside."""
    device = loaded.model.device
    if settings.quantization == "int8" and not _is_float32_on_cpu(loaded):
        raise ConfigurationError("int8 needs device cpu and dtype float32", field="quantization")
    speed_up_linears(loaded.model)
    block_size = settings.block_size if beside is None else beside.backend.block_size
    kernels = _kernels(loaded, settings)
    # what a draft model computes changes no token, and what the kernels compute is exact as it is
    deterministic = settings.deterministic and beside is None and kernels is None
    if deterministic:
        use_deterministic_experts(loaded.model)
    backend: AttentionBackend = (
        SdpaBackend(device, block_size or 16, one_by_one=deterministic)
        if kernels is None
        else PageBackend(kernels, block_size or 16)
    )
    model = PagedModel(
        loaded.model,
        backend,
        kv_dtype=_kv_dtype(loaded, settings, backend),
        row_multiple=ROW_MULTIPLE if deterministic else 1,
    )
    is_free = (beside is None or model.backend.block_size % BLOCK_SIZE == 0) and not deterministic
    if has_kernel(device) and can_attend(model.specs, model.dtype) and is_free:
        model.backend = VarlenBackend(device, _cuda_block_size(block_size))
    return model


def _allocate(
    loaded: LoadedModel, settings: EngineSettings, model: PagedModel, num_blocks: int, max_model_len: int
) -> None:
    # not in kv_dtype: what rounds keys and values would hide small faults from the probe
    model.allocate(num_probe_blocks(model.backend.block_size), model.dtype)
    model.probe()
    model.allocate(num_blocks)
    kernels = _kernels(loaded, settings)
    if settings.quantization == "int8" or (_is_to_be_int8(loaded, settings) and kernels is not None):
        # after the probe, which could be stricter: in 8 bits a small difference may round a number the other way
        quantize(loaded.model, kernels)
    elif kernels is not None and kernels.vector_bytes == 64:  # narrower, and torch's own products are as fast
        pack(loaded.model, kernels, torch.float32)
    model.fuse_layers()
    if isinstance(model.backend, VarlenBackend) and can_record(loaded.model):
        model.record_decode_steps(max_model_len)


def _is_float32_on_cpu(loaded: LoadedModel) -> bool:
    return loaded.model.device.type == "cpu" and loaded.model.dtype is torch.float32


def _is_to_be_int8(loaded: LoadedModel, settings: EngineSettings) -> bool:
    return settings.quantization == "int8" or (settings.quantization == "auto" and loaded.is_quantized)


def _kernels(loaded: LoadedModel, settings: EngineSettings) -> Kernels | None:
    # beside float32 layers, whose rows are padded to be deterministic, attention is torch's
    wanted = settings.compiled_kernels and (not settings.deterministic or _is_to_be_int8(loaded, settings))
    return load() if wanted and _is_float32_on_cpu(loaded) else None


def _kv_dtype(loaded: LoadedModel, settings: EngineSettings, backend: AttentionBackend) -> torch.dtype:
    own: torch.dtype = loaded.model.dtype
    has_choice = isinstance(backend, PageBackend) and backend.block_size % 2 == 0
    if settings.kv_cache_dtype == "auto":
        # beside rows in 8 bits, what bfloat16 rounds away is little
        return torch.bfloat16 if has_choice and _is_to_be_int8(loaded, settings) else own
    wanted: torch.dtype = getattr(torch, settings.kv_cache_dtype)
    if wanted is not own and not has_choice:
        raise ConfigurationError(
            f"kv_cache_dtype is {settings.kv_cache_dtype}, but only the compiled kernels for float32 models on a CPU, with "
            f"an even block_size, can keep keys and values in another format than the model's own",
            field="kv_cache_dtype",
        )
    return wanted


def _cuda_block_size(wanted: int | None) -> int:
    block_size = wanted or BLOCK_SIZE
    if block_size % BLOCK_SIZE:
        raise ConfigurationError(
            f"block_size is {block_size}, but the attention kernel for CUDA needs a multiple of {BLOCK_SIZE}",
            field="block_size",
            limit=BLOCK_SIZE,
        )
    return block_size
