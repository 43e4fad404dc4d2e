"""lm-eval's `local-completions` against transformers on the same weights: the same log-likelihoods."""

from __future__ import annotations

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.conformance.server import MODEL, REPETITION_PENALTY, base_url, serves
from trio_llm.config import EngineSettings
from trio_llm.models.loader import load_model

TOLERANCE = 1e-3
PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a river in the east of Asia"),
    ("Two and two make", " four, and two and three make five."),
    ("Water boils at", " 100 degrees Celsius"),
    ("A haiku:\n", "An old silent pond\nA frog jumps into the pond"),
    ("", "Once upon a time"),
    ("def add(a, b):\n", "    return a + b\n"),
    ("Der Zug nach Köln", " fährt um 8 Uhr – pünktlich 🚆"),
]


@pytest.fixture(scope="module")
def loaded():
    return load_model(MODEL, settings=EngineSettings(dtype="float32"))


@pytest.fixture(scope="module")
def tokenizer_folder(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def evaluator(tokenizer_folder, **options):
    if not serves("/v1/completions", "echo"):
        pytest.skip("echo is not supported yet")
    return LocalCompletionsAPI(
        base_url=f"{base_url()}/v1/completions",
        pretrained=MODEL,
        **{"tokenizer_backend": "huggingface", "tokenizer": tokenizer_folder, "max_length": 2048, **options},
    )


@torch.inference_mode()
def reference(loaded, context, continuation):
    """The log-likelihood of token ids after others, and whether it is the greedy choice."""
    logprobs = loaded.model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    rows = logprobs[len(context) - 1 : -1]
    chosen = torch.tensor(continuation)
    total = rows.gather(1, chosen[:, None]).sum().item()
    return total, bool((rows.argmax(-1) == chosen).all())


@pytest.mark.parametrize("batch_size", [1, 4])
def check_loglikelihood(loaded, tokenizer_folder, batch_size, record_property):
    model = evaluator(tokenizer_folder, batch_size=batch_size)
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(PAIRS)
    ]
    found = model.loglikelihood(requests)
    largest = 0.0
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        ids = (
            model._encode_pair(context, continuation)
            if context
            else ([model.prefix_token_id], model.tok_encode(continuation))
        )
        wanted, greedy_too = reference(loaded, *map(list, ids))
        largest = max(largest, abs(total - wanted))
        assert greedy == greedy_too
    record_property("note", f"largest difference {largest:.1e}")
    assert largest < TOLERANCE


def check_generation(loaded, tokenizer_folder):
    model = evaluator(tokenizer_folder)
    arguments = ("The capital of France is", {"until": ["."], "max_gen_toks": 12, "temperature": 0})
    (text,) = model.generate_until([Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)])
    ids = loaded.tokenizer(arguments[0], return_tensors="pt")
    made = loaded.model.generate(**ids, max_new_tokens=12, do_sample=False, repetition_penalty=REPETITION_PENALTY)[
        0, ids["input_ids"].shape[1] :
    ]
    assert text == loaded.tokenizer.decode(made, skip_special_tokens=True).partition(".")[0]
