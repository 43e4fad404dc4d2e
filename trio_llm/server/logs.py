"""Logging: one stream of records on stderr, whoever wrote them, and one line for each request."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
import trio

from trio_llm.config import ServerSettings
from trio_llm.server.exchange import Exchange

access_logger = structlog.get_logger("trio_llm.access")

_QUIET_PATHS = ("/health", "/metrics")
CLIENT_GONE = 499
"""The status that is logged when the client left before there was one."""


def configure(settings: ServerSettings) -> None:
    """Send structlog's records and those of the standard library (hypercorn, quart, trio) to stderr,
    in one format: JSON unless stderr is a terminal, or as `log_format` says."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    rendering: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in ("hypercorn.error", "hypercorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        logger.addFilter(_written_once)


def _written_once(record: logging.LogRecord) -> bool:
    """Take away the handler that Hypercorn gives its logger as late as when it first speaks: root's writes the record."""
    logging.getLogger(record.name).handlers = []
    return True


def access(exchange: Exchange, *, finished: bool) -> None:
    """Write the line of one request: never its prompt, never its answer."""
    facts: dict[str, Any] = {
        "method": exchange.method,
        "path": exchange.path,
        "status": CLIENT_GONE if exchange.status is None else exchange.status,
        "seconds": round(trio.current_time() - exchange.started, 4),
    }
    if not finished:
        facts["disconnected"] = True
    if exchange.generations:
        facts["model"] = exchange.model
        facts["prompt_tokens"] = sum(generation.usage.prompt_tokens for generation in exchange.generations)
        facts["completion_tokens"] = sum(generation.usage.completion_tokens for generation in exchange.generations)
        reasons = [str(choice.finish_reason) for generation in exchange.generations for choice in generation.choices]
        facts["finish_reason"] = ",".join(reasons)
    elif exchange.prompt_tokens is not None:
        facts["model"] = exchange.model
        facts["prompt_tokens"] = exchange.prompt_tokens
    if exchange.first_token is not None:
        facts["ttft"] = round(exchange.first_token - exchange.started, 4)
    error = exchange.error or exchange.failure
    if error is not None:
        facts["error"] = error.kind
    if exchange.echoed_id != exchange.request_id:
        facts["client_request_id"] = exchange.echoed_id
    quiet = exchange.path.startswith(_QUIET_PATHS)
    access_logger.log(logging.DEBUG if quiet else logging.INFO, "request", **facts)
