"""The field tables of the endpoints that generate nothing: embeddings and the tokenizer."""

from __future__ import annotations

from trio_llm.server.openai.fields import MESSAGE, TOOL, Table, accepted, refused, supported
from trio_llm.server.openai.limits import MAX_ENTRIES, MAX_TOOLS, check_free_form, check_identifier

MAX_INPUTS = 2048
"""Texts of one request for embeddings, as with OpenAI."""

EMBEDDING: Table = {
    "model": supported(remark="A served name, of an embedding model."),
    "input": supported(
        remark=f"A text, an array of up to {MAX_INPUTS} texts, token ids, or an array of such arrays; none empty. "
        "A text that is too long is refused and never cut."
    ),
    "encoding_format": supported(remark="`float` or `base64`, which is 32-bit floats, the lowest byte first."),
    "dimensions": supported(remark="Fewer only for models that were trained for it; the vectors have length 1 then."),
    "user": accepted(check=check_identifier),
    "truncate_prompt_tokens": refused(),
    "add_special_tokens": refused(neutral=(True,)),
    "priority": refused(neutral=(0,)),
}
"""POST /v1/embeddings."""

TOKENIZE: Table = {
    "model": supported(remark="A served name; the first if there is none."),
    "prompt": supported(remark="A text; either this or `messages`."),
    "messages": supported(remark=f"From 1 to {MAX_ENTRIES}, as for chat completions.", table=MESSAGE),
    "tools": supported(remark="Told to the model, if its template takes tools.", table=TOOL, most=MAX_TOOLS),
    "add_special_tokens": supported(remark="Null is true for `prompt` and false for `messages`."),
    "add_generation_prompt": supported(remark="Null is true, unless the final message is continued."),
    "continue_final_message": supported(),
    "chat_template_kwargs": supported(remark="Further variables of the template.", check=check_free_form),
    "return_token_strs": supported(remark="`token_strs`: each token as the vocabulary spells it."),
    "chat_template": refused(),
}
"""POST /tokenize, which is vLLM's."""

DETOKENIZE: Table = {
    "model": supported(remark="A served name; the first if there is none."),
    "tokens": supported(remark="Token ids."),
}
"""POST /detokenize, which is vLLM's."""
