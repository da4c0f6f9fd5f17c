"""Archives by name and version, through the ordinary clients of their registries, into a cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.gather_text.sources import Source

_NO_BUILD = Path(__file__).parent / "no_build"


class DownloadError(RuntimeError):
    """A source that cannot be had as it is pinned; the message names it and says what to do."""


def fetch(source: Source, cache: Path) -> Path:
    """Return the archive of `source`, downloaded into `cache` unless it lies there already.

    Raises:
        DownloadError: If its registry does not give it, or gives a file with another checksum.
    """
    kept = cache / source.archive
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            shutil.move(_download(source, Path(folder)), kept)
    if (found := file_sha256(kept)) != source.sha256:
        kept.unlink()
        raise DownloadError(
            f"{source.label}: the archive has sha256 {found}, not {source.sha256} as pinned. It was removed from the"
            " cache; run again, and if it happens again, look at what changed before you pin the new checksum."
        )
    return kept


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(source: Source, folder: Path) -> Path:
    command = _pip(source) if source.registry == "pypi" else _apt(source)
    environment = {**os.environ, "PYTHONPATH": str(_NO_BUILD)} if source.registry == "pypi" else None
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DownloadError(f"{source.label}: {command[0]} is not on this machine; {_remedy(source)}") from None
    files = list(folder.iterdir())
    if done.returncode or len(files) != 1:
        said = (done.stderr.strip() or "nothing was downloaded").splitlines()[-1]
        raise DownloadError(f"{source.label} cannot be downloaded: {said}. {_remedy(source)}")
    return files[0]


def _pip(source: Source) -> list[str]:
    kind = ["--only-binary", ":all:"] if source.archive.endswith(".whl") else ["--no-binary", ":all:"]
    quiet = ["--quiet", "--progress-bar", "off", "--disable-pip-version-check"]
    # What these three are for is said in no_build/sitecustomize.py.
    unbuilt = ["--no-cache-dir", "--no-build-isolation", "--use-pep517"]
    pinned = f"{source.name}=={source.version}"
    return [sys.executable, "-m", "pip", "download", "--no-deps", *kind, *quiet, *unbuilt, pinned]


def _apt(source: Source) -> list[str]:
    return ["apt-get", "download", "--quiet", f"{source.name}={source.version}"]


def _remedy(source: Source) -> str:
    if source.registry == "pypi":
        return "See that pip reaches its index and that this version is still there, or pass --skip-missing."
    return (
        "On Debian 12, run apt-get update first. A point release may have replaced this version: then pin the one that"
        f" `apt-cache policy {source.name}` shows, with its sha256, or pass --skip-missing."
    )
