"""The files inside source archives, wheels and Debian packages."""

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60


def members(archive: Path, wants: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file in `archive` whose path `wants` says yes to, in its order.

    Paths are relative: to the top folder in a source archive, to the root in a wheel or a Debian package.

    Raises:
        ValueError: If the archive is of no known kind.
    """
    name = archive.name
    if name.endswith((".whl", ".zip")):
        yield from _in_zip(archive, wants, drop_top=name.endswith(".zip"))
    elif name.endswith(".deb"):
        with tarfile.open(fileobj=io.BytesIO(_data_of_deb(archive.read_bytes()))) as tar:
            yield from _in_tar(tar, wants)  # every path opens with "./"
    elif ".tar." in name or name.endswith(".tgz"):
        with tarfile.open(archive) as tar:
            yield from _in_tar(tar, wants)
    else:
        raise ValueError(f"{name} is neither a source archive nor a wheel nor a Debian package")


def _in_zip(archive: Path, wants: Callable[[str], bool], *, drop_top: bool) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            path = _below_top(info.filename) if drop_top else info.filename
            if not info.is_dir() and wants(path):
                yield path, opened.read(info)


def _in_tar(tar: tarfile.TarFile, wants: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        path = _below_top(member.name)
        # Links would give the same text again, or lead out of the archive.
        if member.isfile() and wants(path) and (content := tar.extractfile(member)) is not None:
            yield path, content.read()


def _below_top(path: str) -> str:
    return path.partition("/")[2]


def _data_of_deb(content: bytes) -> bytes:
    """Return the tar file with the files of a Debian package, which is an ar archive of three members."""
    if not content.startswith(_AR_MAGIC):
        raise ValueError("a Debian package must be an ar archive, and this file is none")
    at = len(_AR_MAGIC)
    while at < len(content):
        header = content[at : at + _AR_HEADER_BYTES]
        size = int(header[48:58])
        at += _AR_HEADER_BYTES
        if header.startswith(b"data.tar"):
            return content[at : at + size]
        at += size + size % 2  # members begin at even places
    raise ValueError("this Debian package has no data.tar")
