"""Settings: attrs classes, each field a flag, an environment variable and a TOML key."""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs

from trio_llm.errors import ConfigurationError

# not structlog: settings are resolved before logging can be configured
logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]


@attrs.frozen(kw_only=True)
class EngineSettings:
    """What one engine may use.  Names are vLLM's where vLLM has the same idea."""

    device: str = "auto"
    """"auto" is CUDA where there is a GPU, else the CPU."""
    dtype: DType = "auto"
    """"auto" is float32 on the CPU and bfloat16 on CUDA."""
    quantization: Literal["auto", "none", "int8"] = "auto"
    """"int8" computes linear layers in 8 bits, on the CPU; "auto" does so where the weights come from a
    quantised GGUF file and a C++ compiler is at hand, "none" takes weights as they are."""
    compiled_kernels: bool = True
    """Build kernels for the CPU at first use, where there is a C++ compiler; without them torch does all the work."""
    max_model_len: int | None = None
    """Tokens of context, prompt and output together; None is the model's own limit."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_num_mixed_prompt_tokens: int | None = 128
    """Of these, what prompts may have in a step in which other sequences decode.  None is all."""
    max_mixed_step_ratio: float | None = 2.0
    """How long such a step may take, measured by one without prompts: a lower ratio lets those who decode keep their
    pace, a higher one brings a long prompt to its first token sooner.  None leaves it to the tokens alone."""
    block_size: int | None = None
    """Tokens in a KV block; None lets the attention backend choose."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""
    speculative_method: Literal["off", "ngram", "draft_model"] = "off"
    """"ngram" guesses the next tokens from what the sequence has said before, "draft_model" has a smaller
    model guess them; several are verified in one step, and the tokens are the same as without."""
    speculative_model: str | None = None
    """The model that guesses for "draft_model", of the same vocabulary: a catalogue name, a directory, a
    .gguf file or a Hugging Face name."""
    num_speculative_tokens: int = 8
    """The most tokens that are guessed for a sequence in one step."""
    prompt_lookup_max: int = 4
    """"ngram" looks for the longest of the last `prompt_lookup_max` ..."""
    prompt_lookup_min: int = 2
    """... to `prompt_lookup_min` tokens that was said before."""
    deterministic: bool = False
    """Compute every token in the same way whatever the batch, so that its result is the same to the last bit.
    It costs speed; see docs/exactness.md."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of keys and values; "auto" is bfloat16 where linear layers are computed in 8 bits, and
    that of the model elsewhere."""
    kv_cache_memory: int | None = None
    """Bytes of KV memory; None is min(half of what the process may use, what can be needed)."""
    max_num_queued_reqs: int = 1024
    """Requests that may be in flight beyond max_num_seqs before QueueFull."""
    max_num_queued_tokens: int = 2**20
    """Prompt tokens that may wait for their first output before QueueFull; a prompt that waits alone may be longer."""
    credit_window: int = 256
    """Tokens that a sequence may run ahead of its reader."""
    stream_interval: float = 0.1
    """Seconds that tokens may be held back, to come together with those that follow, while many are served (3.5 ms for each
    sequence but the first); 0 hands over each step's by itself."""
    stall_timeout: float = 120.0
    """Seconds a reader may leave its window full before its request is cancelled."""
    step_timeout: float = 60.0
    """Seconds after which a running step makes the engine unready."""
    step_grace: float = 60.0
    """Further seconds after which a stuck engine is given up as dead."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""

    def __attrs_post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_mixed_prompt_tokens",
            "block_size",
            "kv_cache_memory",
            "max_num_queued_tokens",
            "credit_window",
            "num_speculative_tokens",
            "prompt_lookup_min",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}", field=name)
        if self.max_mixed_step_ratio is not None and not self.max_mixed_step_ratio >= 1:
            raise ConfigurationError(
                f"max_mixed_step_ratio must be at least 1, got {self.max_mixed_step_ratio}",
                field="max_mixed_step_ratio",
            )
        if not self.stream_interval >= 0:
            raise ConfigurationError("stream_interval must not be negative", field="stream_interval")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigurationError(
                f"prompt_lookup_max ({self.prompt_lookup_max}) must not be below prompt_lookup_min "
                f"({self.prompt_lookup_min})",
                field="prompt_lookup_max",
            )
        if self.speculative_method == "draft_model" and not self.speculative_model:
            raise ConfigurationError(
                "speculative_method draft_model needs speculative_model to say which", field="speculative_model"
            )
        if self.max_num_batched_tokens <= self.max_num_seqs:
            # every decoding sequence takes one token a step; what is left lets prompts in
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs "
                f"({self.max_num_seqs}), or prompts could never enter a full batch",
                field="max_num_batched_tokens",
            )


@attrs.frozen(kw_only=True)
class ServerSettings:
    """What the server may do and where it listens; `engine` holds what its engine may use."""

    model: str = "smollm2"
    """A catalogue name, a directory, a .gguf file or a Hugging Face name."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients use for the model, the first being the one that is listed first;
    none is the model's own name."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on, in place of host and port."""
    ssl_certfile: str | None = None
    """A PEM file with the certificate, and those between it and the root, to speak HTTPS with."""
    ssl_keyfile: str | None = None
    """A PEM file with its key; None if the key is in the other file too."""
    api_key: tuple[str, ...] = attrs.field(default=(), repr=False)
    """Keys of which every request but those for /health must show one; none lets everybody in.  Other
    users of the machine can read a flag: the environment or a file keeps it from them."""
    api_key_file: str | None = None
    """A file with more keys, one a line; a line that begins with # is a comment."""
    max_requests_per_key: int | None = None
    """Requests that one key may have in flight; one more is refused with a 429.  None is no limit."""
    allowed_origins: tuple[str, ...] = ()
    """Origins such as https://example.com whose pages a browser lets use this server; * is all."""
    default_max_tokens: int | None = None
    """Tokens to make when a request names no limit; None is the rest of the context."""
    compat: Literal["strict", "lenient"] = "strict"
    """"strict" refuses request fields that are unknown or not supported, "lenient" ignores and logs them."""
    tool_call_parser: Literal["auto", "none", "hermes", "qwen3_coder", "llama3", "mistral", "pythonic"] = "auto"
    """Syntax of the model's tool calls; "auto" goes by its chat template."""
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = "auto"
    """Marks of the model's reasoning; "auto" goes by its chat template, "none" leaves them in the text."""
    max_stored_responses: int = 256
    """Responses of /v1/responses that are kept in memory, to be asked for or continued; 0 keeps none."""
    max_request_bytes: int = 16 * 2**20
    """Largest request body."""
    first_result_timeout: float = 10.0
    """Seconds that a stream waits for its first result before its status line goes out."""
    sse_keep_alive_interval: float = 15.0
    """Seconds of silence after which a stream sends a comment."""
    body_timeout: float = 60.0
    """Seconds in which a request body must have arrived."""
    write_timeout: float = 30.0
    """Seconds in which a client must take what is written to it."""
    keep_alive_timeout: float = 75.0
    """Seconds that an idle connection, or one that is still sending its request's head, stays open."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests may still take after SIGTERM."""
    drain_delay: float = 0.0
    """Seconds between turning unready and refusing requests, so that load balancers can follow."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important records that are written."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """"auto" is JSON unless stderr is a terminal."""
    num_threads: int | None = None
    """Threads of a tensor operation on the CPU; None leaves torch's own choice."""
    switch_interval: float | None = None
    """Seconds between thread switches of the interpreter; None leaves Python's own."""
    engine: EngineSettings = attrs.field(factory=EngineSettings)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port must be from 0 to 65535, got {self.port}", field="port")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigurationError("ssl_keyfile is nothing without ssl_certfile", field="ssl_keyfile")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigurationError(
                    f"allowed_origins: {origin!r} is no origin such as https://example.com, or *",
                    field="allowed_origins",
                )
        check_api_keys(self.api_key, field="api_key")
        if self.max_requests_per_key is not None and not self.api_key and self.api_key_file is None:
            raise ConfigurationError(
                "max_requests_per_key is nothing without api_key or api_key_file", field="max_requests_per_key"
            )
        for name in ("default_max_tokens", "max_requests_per_key", "max_request_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}", field=name)
        for name in (
            "max_stored_responses",
            "shutdown_timeout",
            "drain_delay",
            "first_result_timeout",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} must not be negative", field=name)
        for name in ("sse_keep_alive_interval", "body_timeout", "write_timeout", "keep_alive_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0", field=name)


SETTINGS: dict[str, attrs.Attribute[Any]] = {
    field.name: field
    for settings in (ServerSettings, EngineSettings)
    for field in attrs.fields(attrs.resolve_types(settings))
    if field.name != "engine"
}
"""Every setting by name, flat: a flag, an environment variable and a TOML key each."""

SIZES = frozenset({"kv_cache_memory", "max_request_bytes"})
"""Settings in bytes, which may be written like 2GiB."""

SECRETS = frozenset({"api_key"})
"""Settings whose values are shown nowhere."""

PREFIX = "TRIO_LLM_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP).*)?")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def check_api_keys(keys: Iterable[str], *, field: str) -> None:
    """Refuse keys that no client could send.

    Raises:
        ConfigurationError: one is empty, or holds something that cannot stand in a header.
    """
    if not all(re.fullmatch(r"[!-~]+", key) for key in keys):
        raise ConfigurationError(f"{field}: a key is one or more visible ASCII characters", field=field)


def parse_size(text: str) -> int:
    """Bytes from text such as 500MB, 2GiB or 1048576.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 500MB, 2GiB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_setting(name: str, value: Any) -> Any:
    """The value of one setting, from text (environment, command line) or from a TOML value.

    Raises:
        ConfigurationError: it is not of the setting's type.
    """
    kind, choices = kind_of(name)
    try:
        return _convert(kind, choices, value, size=name in SIZES)
    except ValueError as error:
        wanted = f"one of {', '.join(choices)}" if choices else "a list of texts" if kind is tuple else str(error)
        shown = "the value" if name in SECRETS else repr(value)
        raise ConfigurationError(f"{name}: {shown} is not valid: {wanted}", field=name) from None


def kind_of(name: str) -> tuple[type, tuple[str, ...]]:
    """A setting's type without its `| None`, and its choices if it has a few."""
    annotation: Any = SETTINGS[name].type
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    return get_origin(annotation) or annotation, ()


def _convert(kind: type, choices: tuple[str, ...], value: Any, *, size: bool) -> Any:
    is_text = isinstance(value, str)
    if kind is tuple:
        parts = value.split(",") if is_text else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) and part for part in parts):
            raise ValueError
        return tuple(parts)
    if kind is bool:
        known = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        flag = known.get(value.lower()) if is_text else value
        if not isinstance(flag, bool):
            raise ValueError("expected true or false")
        return flag
    if kind is int:
        if is_text:
            value = parse_size(value) if size else _whole(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("expected a whole number")
        return value
    if kind is float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ValueError("expected a number")
        return number
    if not is_text or (choices and value not in choices):
        raise ValueError("expected text")
    return value


def _whole(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?\d+\s*", text):
        raise ValueError("expected a whole number")
    return int(text)


def resolve(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
) -> ServerSettings:
    """Settings from flags, else the environment, else the [trio_llm] table of a TOML file, else defaults.

    Args:
        flags: settings given explicitly, by name.
        environ: in place of os.environ.
        config: the TOML file; the variable TRIO_LLM_CONFIG names it otherwise.

    Raises:
        ConfigurationError: a value is wrong, the file is missing or malformed, or it holds an unknown key.
    """
    environ = os.environ if environ is None else environ
    config = config or environ.get(CONFIG_VARIABLE) or None
    of_file, of_environment, flags = _from_toml(config), _from_environment(environ), flags or {}
    values = {**of_file, **of_environment, **flags}
    sources = dict.fromkeys(of_file, f"the file {config}")
    sources |= {name: f"the variable {PREFIX}{name.upper()}" for name in of_environment}
    sources |= {name: f"the flag --{name.replace('_', '-')}" for name in flags}
    try:
        return _settings_from({name: parse_setting(name, value) for name, value in values.items()})
    except ConfigurationError as error:
        if error.field not in sources:
            raise
        raise ConfigurationError(f"{error.message} (from {sources[error.field]})", field=error.field) from None


def _settings_from(values: Mapping[str, Any]) -> ServerSettings:
    engine_names = {field.name for field in attrs.fields(EngineSettings)}
    engine = EngineSettings(**{name: value for name, value in values.items() if name in engine_names})
    return ServerSettings(engine=engine, **{name: value for name, value in values.items() if name not in engine_names})


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    service_link = None
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(PREFIX)
        if _SERVICE_LINK.fullmatch(name) and (name != "PORT" or value.startswith("tcp://")):
            # Kubernetes describes a Service called "trio-llm" in variables that look like ours
            service_link = variable
        elif value.startswith("tcp://"):
            logger.warning("%s=%s comes from a Kubernetes service link and is ignored", variable, value)
        elif name.lower() in SETTINGS:
            values[name.lower()] = value
        else:
            logger.warning("unknown environment variable %s%s", variable, _closest(name.lower(), PREFIX, str.upper))
    if service_link is not None:
        logger.warning(
            "%s and its like come from Kubernetes service links and are ignored; "
            "`enableServiceLinks: false` in the pod's spec turns them off",
            service_link,
        )
    return values


def _from_toml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the configuration file {path}: {error.strerror}", field="config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}", field="config") from error
    # the rest of the file may be Hypercorn's
    table = document.get("trio_llm", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: trio_llm must be a table", field="trio_llm")
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in SETTINGS:
            raise ConfigurationError(f"{path}: unknown key {key} in [trio_llm]{_closest(name)}", field=key)
        values[name] = value
    return values


def _closest(name: str, prefix: str = "", spell: Callable[[str], str] = str) -> str:
    matches = difflib.get_close_matches(name, SETTINGS, n=1)
    return f"; did you mean {prefix}{spell(matches[0])}?" if matches else ""
