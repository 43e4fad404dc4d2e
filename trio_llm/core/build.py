"""From a loaded model to an EngineCore."""

from __future__ import annotations

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SdpaBackend
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.memory import num_kv_blocks
from trio_llm.core.model import PagedModel
from trio_llm.core.speculation import StepCosts, speculation_for
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.core.varlen_attention import BLOCK_SIZE, VarlenBackend, can_attend
from trio_llm.errors import ConfigurationError
from trio_llm.models.loader import LoadedModel


def build_core(loaded: LoadedModel, settings: EngineSettings) -> EngineCore:
    """Give a model pages, probe it and put an engine around it.

    Raises:
        ModelNotSupported: the architecture cannot run through paged attention, or runs wrongly.
        ConfigurationError: the KV memory is too small, or max_model_len above the model's own.
    """
    device = loaded.model.device
    speed_up_linears(loaded.model)
    model = PagedModel(loaded.model, SdpaBackend(device, settings.block_size or 16))
    has_own_kernel = device.type == "cuda" and can_attend(model.specs, model.dtype)
    if has_own_kernel:
        model.backend = VarlenBackend(device, _cuda_block_size(settings))
    max_model_len = settings.max_model_len or loaded.max_model_len
    if max_model_len > loaded.max_model_len:
        raise ConfigurationError(
            f"max_model_len is {max_model_len}, but the model's context is {loaded.max_model_len}",
            field="max_model_len",
        )
    num_blocks = num_kv_blocks(
        model.specs,
        block_size=model.backend.block_size,
        dtype=model.dtype,
        device=device,
        settings=settings,
        max_model_len=max_model_len,
    )
    model.allocate(num_blocks)
    model.probe()
    if has_own_kernel:
        model.record_decode_steps(max_model_len)
    executor = TorchExecutor(model, num_blocks=num_blocks, max_model_len=max_model_len)
    costs = StepCosts.measure(executor) if settings.speculative_method != "off" else None
    return EngineCore(executor, settings, speculation_for(settings, executor.info.vocab_size, costs))


def _cuda_block_size(settings: EngineSettings) -> int:
    block_size = settings.block_size or BLOCK_SIZE
    if block_size % BLOCK_SIZE:
        raise ConfigurationError(
            f"block_size is {block_size}, but the attention kernel for CUDA needs a multiple of {BLOCK_SIZE}",
            field="block_size",
            limit=BLOCK_SIZE,
        )
    return block_size
