"""The command line: `trio-llm serve` and `trio-llm pull`.

Commands import what they need when they run, so that `trio-llm --help` is quick.
"""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any, NoReturn

import attrs
import cyclopts

from trio_llm import config
from trio_llm.docstrings import attribute_docstrings
from trio_llm.errors import ConfigurationError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE_DIED = 3


_METAVARS = {bool: None, int: "INTEGER", float: "NUMBER", str: "TEXT", tuple: "TEXT..."}
"""What a flag's help calls its value, by the setting's type."""


def _version() -> str:
    from importlib.metadata import version

    return version("trio-llm")


app = cyclopts.App(
    name="trio-llm",
    help="An LLM inference engine and server in which every request can be cancelled at any moment.",
    help_format="plaintext",
    version=_version,
    exit_on_error=False,
    print_error=False,
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and leave the process with its exit code: 0 well done (or drained), 1 could not
    load or configure, 2 usage, 3 the engine died."""
    try:
        code = app(arguments)
    except cyclopts.CycloptsError as error:
        _complain(" ".join(str(error).split()))
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(line: str) -> None:
    print(f"trio-llm: {line}", file=sys.stderr, flush=True)


def _description(name: str) -> str:
    owners = (config.EngineSettings, config.ServerSettings)
    return next((text for owner in owners if (text := attribute_docstrings(owner).get(name))), "")


def _flag(name: str) -> inspect.Parameter:
    """A setting as a flag.  Its default is None, "not given", so that other sources can speak; text
    is checked where that of all sources is."""
    field = config.SETTINGS[name]
    kind, choices = config.kind_of(name)
    is_flag = kind is bool
    default = field.default if field.default not in (None, ()) and field.default is not attrs.NOTHING else None
    help_text = _description(name)
    if default is not None:
        help_text += f" [default: {default}]"
    annotation: Any = bool | None if is_flag else list[str] | None if kind is tuple else str | None
    metavar = "|".join(choices) or ("SIZE" if name in config.SIZES else _METAVARS[kind])
    parameter = cyclopts.Parameter(
        help=help_text.strip(), show_default=False, negative=None if is_flag else (), metavar=metavar
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, parameter]
    )


def _with_flags(function: Any) -> Any:
    """Give a function of (model, config_file, **flags) a flag for each setting."""
    signature = inspect.signature(function)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    flags = [_flag(name) for name in config.SETTINGS if name != "model"]
    function.__signature__ = signature.replace(parameters=[*named, *flags])
    return function


@app.command
@_with_flags
def serve(
    model: Annotated[str | None, cyclopts.Parameter(help=_description("model") + " [default: smollm2]")] = None,
    *,
    config_file: Annotated[
        str | None,
        cyclopts.Parameter(name="--config", help="A TOML file with settings in its [trio_llm] table.", metavar="PATH"),
    ] = None,
    **flags: Any,
) -> int:
    """Serve a model over an OpenAI-compatible API until SIGTERM or Ctrl-C.

    Each flag is also a variable TRIO_LLM_<FLAG> of the environment and a key of the [trio_llm] table
    of a TOML file; flags go before the environment, and that before the file.
    """
    given = {name: value for name, value in {"model": model, **flags}.items() if value is not None}
    try:
        settings = config.resolve(given, config=config_file)
    except ConfigurationError as error:
        _complain(error.message)
        return EXIT_USAGE if error.field in given else EXIT_FAILED
    from trio_llm.cli.serve import run

    return run(settings, complain=_complain)


@app.command
def pull(model: Annotated[str, cyclopts.Parameter(help="A name from the catalogue, such as smollm2.")]) -> int:
    """Download a model of the catalogue, so that serving it needs no network."""
    from trio_llm.cli.pull import pull as fetch
    from trio_llm.errors import TrioLLMError

    try:
        fetch(model)
    except TrioLLMError as error:
        _complain(error.message)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    main()
