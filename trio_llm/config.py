"""Settings: attrs classes, each field a flag, an environment variable and a TOML key."""

from __future__ import annotations

from typing import Literal

import attrs

from trio_llm.errors import ConfigurationError

DType = Literal["auto", "float32", "bfloat16", "float16"]


@attrs.frozen(kw_only=True)
class EngineSettings:
    """What one engine may use.  Names are vLLM's where vLLM has the same idea."""

    device: str = "auto"
    """"auto" is CUDA where there is a GPU, else the CPU."""
    dtype: DType = "auto"
    """"auto" is float32 on the CPU and bfloat16 on CUDA."""
    max_model_len: int | None = None
    """Tokens of context, prompt and output together; None is the model's own limit."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    block_size: int | None = None
    """Tokens in a KV block; None lets the attention backend choose."""
    kv_cache_memory: int | None = None
    """Bytes of KV memory; None is min(half of what the process may use, what can be needed)."""
    max_num_queued_reqs: int = 1024
    """Requests that may be in flight beyond max_num_seqs before QueueFull."""
    credit_window: int = 256
    """Tokens that a sequence may run ahead of its reader."""
    stall_timeout: float = 120.0
    """Seconds a reader may leave its window full before its request is cancelled."""
    step_timeout: float = 60.0
    """Seconds after which a running step makes the engine unready."""
    step_grace: float = 60.0
    """Further seconds after which a stuck engine is given up as dead."""
    trust_remote_code: bool = False
    revision: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "credit_window"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1", field=name)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            # every decoding sequence takes one token a step; what is left lets prompts in
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs "
                f"({self.max_num_seqs}), or prompts could never enter a full batch",
                field="max_num_batched_tokens",
            )
