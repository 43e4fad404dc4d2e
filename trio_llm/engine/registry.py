"""Engine | Embedder model names and the engines behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trio_llm.errors import ModelNotFound

if TYPE_CHECKING:
    from trio_llm.engine.embedding import Embedder
    from trio_llm.engine.engine import Engine


class Registry:
    """A dict of served names to engines whose lookups fail with ModelNotFound.

    An engine may be served under several names.
    """

    def __init__(self, engines: Mapping[str, Engine | Embedder] | None = None) -> None:
        self._engines: dict[str, Engine | Embedder] = dict(engines or {})

    def get(self, name: str) -> Engine | Embedder:
        """The engine served under `name`.

        Raises:
            ModelNotFound: there is none; the message names those there are.
        """
        try:
            return self._engines[name]
        except KeyError:
            served = ", ".join(map(repr, self._engines)) or "none"
            message = f"the model {name[:80]!r} is not served here; served: {served}"
            raise ModelNotFound(message, field="model", model=name, served=list(self._engines)) from None

    __getitem__ = get

    def __setitem__(self, name: str, engine: Engine | Embedder) -> None:
        self._engines[name] = engine

    def __delitem__(self, name: str) -> None:
        self.get(name)
        del self._engines[name]

    def __contains__(self, name: object) -> bool:
        return name in self._engines

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def items(self) -> list[tuple[str, Engine | Embedder]]:
        """Names and engines, in the order in which they were added."""
        return list(self._engines.items())

    def engines(self) -> list[Engine | Embedder]:
        """Each engine once, whatever names it has."""
        return list({id(engine): engine for engine in self._engines.values()}.values())
