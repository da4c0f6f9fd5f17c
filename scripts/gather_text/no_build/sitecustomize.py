"""Lets pip download a source archive without running any of the code inside it.

pip asks the build backend of every source archive for its metadata, even if it is told to fetch the archive and no
more. That would install dozens of build tools, compile parts of some packages, and run code that nobody here needs.
With this folder on PYTHONPATH, and with build isolation off, the answer comes from PKG-INFO, which lies in every source
archive.

Python imports a module of this name at start-up. In the process that calls the backend, it puts itself in its place.
"""

import os
import shutil
from email.parser import HeaderParser
from pathlib import Path

# The prefix differs between versions of pip.
for _prefix in ("PEP517", "_PYPROJECT_HOOKS"):
    if f"{_prefix}_BUILD_BACKEND" in os.environ:
        os.environ[f"{_prefix}_BUILD_BACKEND"] = __name__
        os.environ.pop(f"{_prefix}_BACKEND_PATH", None)


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    """Return what a build would need: nothing, as none is made."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    """Write the metadata of the archive unpacked in the current folder, and return the name of its folder."""
    headers = HeaderParser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))
    folder = f"{headers['Name'].replace('-', '_')}-{headers['Version']}.dist-info"
    (Path(metadata_directory) / folder).mkdir()
    shutil.copyfile("PKG-INFO", Path(metadata_directory) / folder / "METADATA")
    return folder
