"""The files inside source archives, wheels and Debian packages."""

import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of every file in `archive`, in its order.

    Paths are relative: to the top folder in a source archive, to the root in a wheel or a Debian package.

    Raises:
        ValueError: If the archive is of no known kind.
    """
    name = archive.name
    if name.endswith((".whl", ".zip")):
        yield from _in_zip(archive, drop_top=name.endswith(".zip"))
    elif name.endswith(".deb"):
        with tarfile.open(fileobj=io.BytesIO(_data_of_deb(archive.read_bytes()))) as tar:
            yield from _in_tar(tar, drop_top=True)  # every path opens with "./"
    elif ".tar." in name or name.endswith(".tgz"):
        with tarfile.open(archive) as tar:
            yield from _in_tar(tar, drop_top=True)
    else:
        raise ValueError(f"{name} is neither a source archive nor a wheel nor a Debian package")


def _in_zip(archive: Path, *, drop_top: bool) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if not info.is_dir():
                yield _relative(info.filename, drop_top), opened.read(info)


def _in_tar(tar: tarfile.TarFile, *, drop_top: bool) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        # Links would give the same text again, or lead out of the archive.
        if member.isfile() and (content := tar.extractfile(member)) is not None:
            yield _relative(member.name, drop_top), content.read()


def _relative(path: str, drop_top: bool) -> str:
    return path.partition("/")[2] if drop_top else path


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
