"""Structured output: which tokens may come next so that the whole text has the form that was asked for.

llguidance compiles a schema, an expression or a grammar against the model's vocabulary, and
says for a text so far which tokens can go on: a bit for each of the vocabulary.  Compiling is
done once for each source, outside of the engine's thread; what comes of it is a `Grammar`.
Each sequence follows its own tokens through it with a `GrammarState`.

llguidance is imported when the first grammar is compiled.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.errors import FormFailed, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.uint32]
"""A set of tokens: token i is bit i % 32 of word i // 32."""

MAX_GRAMMARS = 64
"""Compiled grammars that are kept for the next request with the same source."""

STACK_SIZE = 2**29
"""Of a thread that compiles: llguidance follows rules and references by recursion, of which a source of
MAX_STRUCTURE_BYTES can ask for many thousand levels.  Memory is taken only for those that there are."""

MAX_JOINED = 16
"""Expressions that a text may have to match at once: each more doubles the time, which no limit of llguidance bounds."""

JSON_FORM = {
    # a blank at most, and only there: with free white space a model can say nothing else until max_tokens
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
}
"""How JSON is written; in a Lark grammar, where a %json schema has no "x-guidance" of its own."""

_LARK = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(%json\s*\{)(\s*\})?""")
"""Comments, strings and expressions, to skip, and the beginning of a schema."""

LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 50_000,
    # a message must show nothing of the text
    "verbose_errors": False,
}
"""llguidance's own, most of them lower: a grammar that needs more in one step would hold up the whole batch.
Only objects may have more properties that can be left out: some 2,000."""


def words_of(token_ids: Iterable[int], vocab_size: int) -> Words:
    """A set of tokens as bits; ids outside of the vocabulary are left out."""
    there = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    ids = np.fromiter(token_ids, dtype=np.int64)
    there[ids[ids < vocab_size]] = 1
    return np.packbits(there, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def without(words: Words, token_ids: npt.NDArray[np.int64]) -> Words:
    """A set less some tokens."""
    left = words.copy()
    inside = token_ids[token_ids < 32 * len(words)]
    np.bitwise_and.at(left, inside >> 5, ~(np.uint32(1) << (inside & 31).astype(np.uint32)))
    return left


@attrs.frozen(eq=False)
class Grammar:
    """A compiled structured output; never changes, and may be used from any thread."""

    matcher: LLMatcher
    """Before the first token."""
    vocabulary: Words
    """The tokens that the model's logits have."""
    ends: Words
    """The model's end tokens."""
    eos_token_ids: frozenset[int]

    def start(self) -> GrammarState:
        """Follow one more text through the grammar."""
        return GrammarState(self)


class GrammarState:
    """Where one sequence stands in a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._num_outside = 0
        """Tokens, the last ones, that the matcher has not taken: the end, or what the grammar does not allow."""

    def push(self, token: int) -> None:
        """The text goes on with a token, which may be a draft that the grammar does not allow."""
        if self._num_outside or token in self.grammar.eos_token_ids or not self._matcher.try_consume_tokens([token]):
            self._num_outside += 1

    def pop(self, num_tokens: int) -> None:
        """Forget the last tokens.

        Raises:
            FormFailed: the grammar does not find its way back.
        """
        outside = min(num_tokens, self._num_outside)
        self._num_outside -= outside
        if num_tokens > outside and not self._matcher.rollback(num_tokens - outside):
            raise self.failure()

    @property
    def is_outside(self) -> bool:
        """Whether the text has ended, or is none of the grammar's."""
        return self._num_outside > 0

    def allowed(self) -> Words:
        """The tokens that may come next, with the end tokens where the text is complete.

        Raises:
            FormFailed: the grammar is too much for its limits, or broken.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise self.failure()
        known = self.grammar.vocabulary
        return words[: len(known)] & known

    def failure(self) -> FormFailed:
        """Why it cannot go on."""
        reason = _reason(self._matcher.get_error()) or "the output is none of its texts"
        return FormFailed(f"structured_output failed: {reason}", field="structured_output")


class GrammarCompiler:
    """Compiles structured outputs for one model, and keeps the last ones.  May be used from any thread.

    Args:
        tokenizer: transformers' own kind, with a backend of the tokenizers library.
        vocab_size: logits of the model; may be more than the tokenizer has tokens.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary = words_of(range(vocab_size), vocab_size)
        self._ends = words_of(eos_token_ids, vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._making = threading.Lock()
        """Held while the tokenizer is made, which takes most of a second."""
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        """Of `_grammars`; never held for long."""

    def find(self, structure: StructuredOutput) -> Grammar | None:
        """The grammar of a structured output, if it was compiled lately."""
        with self._lock:
            grammar = self._grammars.get(structure)
            if grammar is not None:
                self._grammars.move_to_end(structure)
            return grammar

    def compile(self, structure: StructuredOutput) -> Grammar:
        """The grammar of a structured output.

        Raises:
            InvalidRequest: it cannot be compiled, with the compiler's words; or no text can
                have this form; or the model's tokenizer cannot be used.
        """
        grammar = self.find(structure)
        if grammar is None:
            grammar = _on_large_stack(lambda: self._compile(structure))
            with self._lock:
                self._grammars[structure] = grammar
                if len(self._grammars) > MAX_GRAMMARS:
                    self._grammars.popitem(last=False)
        return grammar

    def _compile(self, structure: StructuredOutput) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._make_tokenizer()
        try:
            source = _source(structure)
        except ValueError as error:
            raise _refused(str(error)) from None
        if not _can_spell(tokenizer, structure):
            raise _refused("it has characters for which the model's tokenizer has no tokens")
        if _num_joined(structure) > MAX_JOINED:
            raise _refused(f"more than {MAX_JOINED} expressions might have to match at once")
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            # the first mask costs the most; and it shows whether there is any text of this form
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(_reason(matcher.get_error()))
        return Grammar(matcher, self._vocabulary, self._ends, self._eos_token_ids)

    def _make_tokenizer(self) -> LLTokenizer:
        with self._making:
            if self._tokenizer is not None:
                return self._tokenizer
            if not self._eos_token_ids:
                raise _refused("the model has no end token, so a text could never be complete")
            from llguidance.hf import from_tokenizer

            try:
                # ids that only the logits, or only the tokenizer, have are tokens without text
                size = max(self._vocab_size, len(self._hf_tokenizer))
                self._tokenizer = from_tokenizer(self._hf_tokenizer, size, sorted(self._eos_token_ids))
            except (ValueError, TypeError) as error:
                raise _refused(f"the model's tokenizer cannot be used: {error}") from error
            return self._tokenizer


_starting = threading.Lock()


def _on_large_stack(compile_: Callable[[], Grammar]) -> Grammar:
    """Compile in a thread of STACK_SIZE, and wait for it: on the usual stack a long chain of rules ends the process."""
    result: Future[Grammar] = Future()

    def run() -> None:
        try:
            result.set_result(compile_())
        except BaseException as error:
            # a panic in llguidance is no Exception
            result.set_exception(error if isinstance(error, Exception) else _refused("the compiler gave up"))

    thread = threading.Thread(target=run, name="trio_llm grammar", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK_SIZE)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return result.result()


def _source(structure: StructuredOutput) -> str:
    """A structured output in llguidance's own language.

    Raises:
        ValueError: it is no JSON to llguidance.
    """
    from llguidance import LLMatcher

    match structure.kind:
        case "json_schema":
            schema = json.loads(structure.value)
            # llguidance's options, which are the engine's affair
            schema.pop("x-guidance", None)
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_FORM)  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_FORM)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(structure.value)
        case "choice":
            # Lark's strings are those of JSON
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structure.choices)))
        case "lark":
            return LLMatcher.grammar_from_lark(_LARK.sub(_with_json_form, structure.value))


def _with_json_form(found: re.Match[str]) -> str:
    beginning, end = found.groups()
    if beginning is None:
        return found[0]
    return f'{beginning}"x-guidance": {json.dumps(JSON_FORM)}{"," if end is None else end}'


def _can_spell(tokenizer: LLTokenizer, structure: StructuredOutput) -> bool:
    """Whether the tokenizer has tokens for a source's characters; llguidance would go astray where it has not."""
    is_json = structure.kind in ("json_schema", "choice")
    text = json.dumps(json.loads(structure.value), ensure_ascii=False) if is_json else structure.value
    unusual = "".join(sorted({character for character in text if not " " <= character <= "~"})).encode()
    return unusual in tokenizer.decode_bytes(tokenizer.tokenize_bytes(unusual))


def _num_joined(structure: StructuredOutput) -> int:
    """How many expressions a text might have to match at once (by "&", or by patterns under allOf or $ref), at most."""
    if structure.kind == "lark":
        text = structure.value
        num_patterns = (
            len(re.findall(r'"(?:pattern|format)"\s*:', text)) if re.search(r'"(?:allOf|\$ref)"', text) else 0
        )
        return num_patterns + _LARK.sub(lambda found: found[1] or "", text).count("&")
    num_patterns, is_joined = 0, False
    nodes: list[Any] = [json.loads(structure.value)] if structure.kind == "json_schema" else []
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            own = ("pattern" in node) + ("format" in node)
            others = node["allOf"] if isinstance(node.get("allOf"), list) else []
            num_patterns += own
            is_joined |= len(others) + ("$ref" in node) > 0 and own + len(others) + ("$ref" in node) > 1
            nodes += node.values()
    return num_patterns if is_joined else 0


def _reason(message: str) -> str:
    """What llguidance says, without what is for its own debugging."""
    reason = message.replace("<non-verbose/>", "").strip()
    if reason.startswith("NoExtension"):
        return "no text can have this form"
    return reason if len(reason) <= 1000 else f"{reason[:997]}..."


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"structured_output cannot be served: {reason}", field="structured_output")
