"""Three forms of model, each as transformers itself would load it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trio_llm.config import EngineSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.errors import ConfigurationError, ModelLoadError, ModelNotSupported
from trio_llm.models.loader import LoadedModel, load_model, resolve_device, resolve_dtype

CPU = EngineSettings(device="cpu")
IDS = torch.tensor([[1, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150]])

Make = Callable[..., Any]


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


def same_state(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """The same weights and buffers, in the same dtypes."""
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(theirs, kind)())
        found = dict(getattr(ours, kind)())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


# --- the model of the catalogue ---------------------------------------------------------------------------------


def test_smollm2_has_the_logits_of_transformers_own_load(smollm2: LoadedModel, smollm2_path: Path) -> None:
    directory, name = smollm2_path.parent, smollm2_path.name
    config = AutoConfig.from_pretrained(directory, gguf_file=name)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict(tensors, strict=False)
    theirs.tie_weights()
    same_state(smollm2.model, theirs)
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(logits(smollm2.model, ids), logits(theirs, ids), rtol=0, atol=0)


def test_smollm2_is_described_in_full(smollm2: LoadedModel) -> None:
    assert smollm2.name == "smollm2"
    assert smollm2.max_model_len == 8192
    assert smollm2.defaults == SamplingParams(temperature=0.2, top_p=0.9)  # its model card's
    # <|im_end|>, which the file names, and <|endoftext|>, which it only has
    assert smollm2.eos_token_ids == {0, 2}
    assert smollm2.tokenizer.chat_template
    assert smollm2.load_seconds > 0
    assert smollm2.import_seconds >= 0
    assert not smollm2.model.training
    assert not any(parameter.requires_grad for parameter in smollm2.model.parameters())
    assert smollm2.model.config._attn_implementation == "sdpa"


def test_a_cached_smollm2_loads_in_under_five_seconds_after_imports(smollm2: LoadedModel) -> None:
    again = load_model("smollm2", settings=CPU)
    assert again.load_seconds < 5


# --- GGUF files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        *((name, True) for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3")),
        *((name, False) for name in ("llama", "qwen2", "qwen3", "gemma3")),
    ],
)
def test_a_gguf_file_has_the_logits_of_the_model_it_was_made_from(
    architecture: str, tied: bool, tiny_model: Make, make_gguf: Make
) -> None:
    original = tiny_model(architecture, tie_word_embeddings=tied)
    loaded = load_model(str(make_gguf(architecture, original)), settings=CPU)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=1e-5, atol=1e-5)
    assert loaded.model.config.tie_word_embeddings == tied
    assert loaded.name == "tiny"
    assert loaded.max_model_len == 128
    assert loaded.eos_token_ids == {2, 3}


def test_a_gguf_file_of_biased_llama(tiny_model: Make, make_gguf: Make) -> None:
    original = tiny_model("llama", attention_bias=True, mlp_bias=True)
    loaded = load_model(str(make_gguf("llama", original)), settings=CPU)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=1e-5, atol=1e-5)


def test_a_quantised_gguf_file_in_bfloat16(tiny_model: Make, make_gguf: Make) -> None:
    original = tiny_model("llama")
    path = make_gguf("llama", original, kind=gguf.GGMLQuantizationType.Q8_0)
    loaded = load_model(str(path), settings=EngineSettings(device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.model.buffers()} == {torch.float32}
    wide = load_model(str(path), settings=CPU).model
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(name).bfloat16())


def test_linear_rope_scaling_is_kept(tiny_model: Make, make_gguf: Make) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    original = tiny_model("llama", rope_parameters=rope)
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    loaded = load_model(str(make_gguf("llama", original, extra=extra)), settings=CPU)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=1e-5, atol=1e-5)


def test_the_rope_factors_of_llama_3_are_applied(tiny_model: Make, make_gguf: Make) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    original = tiny_model("llama", rope_parameters=rope)
    plain = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    factors = plain.model.rotary_emb.inv_freq / original.model.rotary_emb.inv_freq
    assert factors.max() > 7
    path = make_gguf("llama", original, tensors={"rope_freqs.weight": factors.numpy()})
    loaded = load_model(str(path), settings=CPU)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "rope scaling of type 'longrope'"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "over a part of each head"),
        ({"extra": {"llama.expert_count": 8}}, "with experts"),
        ({"extra": {"split.count": 3}}, "split over 3 GGUF files"),
        ({"tensors": {"blk.0.attn_sinks.weight": torch.zeros(4).numpy()}}, "'blk.0.attn_sinks.weight' has no place"),
        ({"pre": "tomorrow"}, "pre-tokenizer 'tomorrow'"),
    ],
)
def test_variants_that_would_run_wrongly_are_refused(
    metadata: dict[str, Any], words: str, tiny_model: Make, make_gguf: Make
) -> None:
    with pytest.raises(ModelNotSupported, match=words):
        load_model(str(make_gguf("llama", tiny_model("llama"), **metadata)), settings=CPU)


def test_an_unknown_gguf_architecture_is_refused(tiny_model: Make, make_gguf: Make) -> None:
    path = make_gguf("llama", tiny_model("llama"))
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba")
    )
    with pytest.raises(ModelNotSupported, match="'mamba' is not supported; supported are llama, qwen2"):
        load_model(str(path), settings=CPU)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "attention.key_length"])
def test_numbers_that_the_tensors_do_not_bear_out_are_refused(key: str, tiny_model: Make, make_gguf: Make) -> None:
    path = make_gguf("llama", tiny_model("llama"))
    content = path.read_bytes()
    place = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    path.write_bytes(content[:place] + (1 << 30).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(ModelLoadError, match=r"the GGUF file (states|has no token embedding)"):
        load_model(str(path), settings=CPU)


def test_a_gguf_file_without_one_of_its_weights_is_refused(tiny_model: Make, make_gguf: Make) -> None:
    path = make_gguf("llama", tiny_model("llama"))
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=r"weights are missing .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(path), settings=CPU)


# --- Hugging Face directories -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "gemma3", "mistral", "phi3", "gpt2", "mixtral", "qwen3_moe"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_is_loaded_as_transformers_loads_it(
    architecture: str, dtype: str, tiny_model: Make, make_directory: Make
) -> None:
    path = make_directory(tiny_model(architecture))
    loaded = load_model(str(path), settings=EngineSettings(device="cpu", dtype=dtype))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    same_state(loaded.model, theirs)
    torch.testing.assert_close(logits(loaded.model), logits(theirs), rtol=0, atol=0)
    assert loaded.model.dtype == getattr(torch, dtype)
    assert type(loaded.model) is type(theirs)
    assert loaded.name == "tiny"
    assert loaded.max_model_len == 128
    assert loaded.tokenizer.chat_template


def test_end_tokens_are_the_union_of_all_places(tiny_model: Make, make_directory: Make) -> None:
    path = make_directory(tiny_model("llama", eos_token_id=7))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert load_model(str(path), settings=CPU).eos_token_ids == {2, 7, 8, 9}


@pytest.mark.parametrize(
    ("recommended", "defaults"),
    [
        ({}, SamplingParams()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05),
        ),
        ({"do_sample": True, "temperature": 0.6}, SamplingParams(temperature=0.6)),
        ({"do_sample": False}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.6}, SamplingParams()),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({"do_sample": False, "repetition_penalty": 1.1}, SamplingParams(temperature=0.0, repetition_penalty=1.1)),
        (
            {"do_sample": True, "typical_p": 0.9, "repetition_penalty": 1.1},
            SamplingParams(typical_p=0.9, repetition_penalty=1.1),
        ),
    ],
)
def test_default_sampling_is_that_of_generation_config(
    recommended: dict[str, Any], defaults: SamplingParams, tiny_model: Make, make_directory: Make
) -> None:
    path = make_directory(tiny_model("llama"))
    (path / "generation_config.json").write_text(json.dumps(recommended))
    assert load_model(str(path), settings=CPU).defaults == defaults


def test_default_sampling_that_nobody_could_ask_for_is_a_load_error(tiny_model: Make, make_directory: Make) -> None:
    path = make_directory(tiny_model("llama"))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 5.0}))
    with pytest.raises(ModelLoadError, match="temperature must be at least 0"):
        load_model(str(path), settings=CPU)


def test_a_checkpoint_without_one_of_its_weights_is_refused(tiny_model: Make, make_directory: Make) -> None:
    path = make_directory(tiny_model("llama", num_hidden_layers=1))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelLoadError, match=r"weights are missing .*model\.layers\.1\."):
        load_model(str(path), settings=CPU)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "cannot be loaded"),
        ("config.json", '{"model_type": "tomorrow"}', "cannot be loaded"),
        ("model.safetensors", "no weights", "cannot be loaded"),
        ("tokenizer.json", "{", "has no tokenizer that can be loaded"),
    ],
)
def test_a_damaged_directory_is_a_load_error(
    name: str, content: str, words: str, tiny_model: Make, make_directory: Make
) -> None:
    path = make_directory(tiny_model("llama"))
    (path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_model(str(path), settings=CPU)
    assert "\n" not in caught.value.message


def test_a_hub_name_without_a_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"nobody/nothing cannot be loaded \(and there is no such") as caught:
        load_model("nobody/nothing", settings=CPU)
    assert "\n" not in caught.value.message


# --- a good neighbour -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["directory", "gguf"])
def test_loading_changes_nothing_of_what_another_thread_runs(
    form: str, tiny_model: Make, make_directory: Make, make_gguf: Make
) -> None:
    running = tiny_model("llama")
    expected = logits(running)
    path = make_directory(tiny_model("qwen3")) if form == "directory" else make_gguf("qwen3", tiny_model("qwen3"))
    settings = EngineSettings(device="cpu", dtype="bfloat16")
    faults: list[str] = []
    rounds = 0
    started, done = threading.Event(), threading.Event()

    def run() -> None:
        nonlocal rounds
        while not done.is_set():
            made = (torch.zeros(2), torch.empty(2), torch.ones(2), torch.tensor(0.5), torch.linspace(0, 1, 3))
            if {(tensor.dtype, tensor.device.type) for tensor in made} != {(torch.float32, "cpu")}:
                faults.append("factories")
            if torch.get_default_dtype() != torch.float32:
                faults.append("default dtype")
            weight = torch.empty(2)
            if not torch.equal(torch.nn.init.ones_(weight), torch.ones(2)):
                faults.append("torch.nn.init")
            if not torch.equal(logits(running), expected):
                faults.append("logits")
            rounds += 1
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(30)
        before = rounds
        for _ in range(200):  # ends when enough rounds ran beside loads, on a busy machine too
            assert load_model(str(path), settings=settings).model.dtype == torch.bfloat16
            if rounds >= before + 20:
                break
    finally:
        done.set()
        thread.join()
    assert rounds >= before + 20
    assert not faults


def test_loads_take_turns(tiny_model: Make, make_directory: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_directory(tiny_model("llama"))
    inside = 0
    most = 0
    original = AutoModelForCausalLM.from_pretrained

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return original(*args, **kwargs)
        finally:
            inside -= 1

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", count)
    threads = [threading.Thread(target=load_model, args=(str(path),), kwargs={"settings": CPU}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_failed_load_leaves_nothing_changed(tmp_path: Path) -> None:
    from transformers import modeling_utils
    from transformers.utils import logging

    before = (modeling_utils.local_torch_dtype, logging.get_verbosity(), logging.is_progress_bar_enabled())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError):
        load_model(str(tmp_path), settings=CPU)
    assert before == (modeling_utils.local_torch_dtype, logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_loading_writes_nothing_to_the_terminal(
    tiny_model: Make, make_directory: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_directory(tiny_model("llama"))
    capfd.readouterr()
    load_model(str(path), settings=CPU)
    assert capfd.readouterr() == ("", "")


def test_importing_the_loader_imports_nothing_heavy() -> None:
    code = (
        "import sys, trio_llm.models.loader, trio_llm.prompt.chat_template, trio_llm.cli.pull;"
        "print({'torch', 'transformers', 'numpy', 'rich', 'jinja2'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_a_gguf_file_needs_no_gguf_package_and_no_network(tiny_model: Make, make_gguf: Make) -> None:
    code = (
        "import socket, sys\n"
        "sys.modules['gguf'] = sys.modules['accelerate'] = None\n"
        "def refuse(*args): raise AssertionError('network')\n"
        "socket.getaddrinfo = socket.socket.connect = refuse\n"
        "from trio_llm.models.loader import load_model\n"
        "from trio_llm.prompt.chat_template import render_chat\n"
        "model = load_model(sys.argv[1])\n"
        "print(len(render_chat(model.tokenizer, [{'role': 'user', 'content': 'hi'}])))\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(make_gguf("llama", tiny_model("llama")))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("25\n", "")


# --- device and dtype -------------------------------------------------------------------------------------------


def test_the_automatic_dtype_is_float32_on_a_cpu_and_bfloat16_elsewhere() -> None:
    assert resolve_dtype(EngineSettings(), torch.device("cpu")) == torch.float32
    assert resolve_dtype(EngineSettings(), torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype(EngineSettings(dtype="float16"), torch.device("cpu")) == torch.float16


def test_the_automatic_device_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(EngineSettings()).type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineSettings()).type == "cpu"


@pytest.mark.parametrize("device", ["teapot", "cuda:99"])
def test_a_device_that_is_not_there_is_a_configuration_error(device: str) -> None:
    with pytest.raises(ConfigurationError, match=f"device '{device}' is not available") as caught:
        resolve_device(EngineSettings(device=device))
    assert caught.value.field == "device"
