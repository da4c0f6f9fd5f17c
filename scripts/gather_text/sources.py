"""The list of sources: what it may say, and what it says."""

import re
import tomllib
from dataclasses import dataclass, field, fields
from fnmatch import translate
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "configs" / "train" / "sources.toml"
DOMAINS = ("code", "docs", "prose", "glosses")

# Licences that ask for no more than a notice. "LicenseRef-PublicDomain" is no licence but the lack of need for one.
ALLOWED_LICENCES = frozenset(
    {
        *("MIT", "MIT-CMU", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Apache-2.0", "PSF-2.0", "ISC", "HPND"),
        *("Zlib", "Unlicense", "CC0-1.0", "LicenseRef-PublicDomain", "LicenseRef-WordNet-3.0"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One package, and what is taken from it.

    Attributes:
        registry: "pypi" or "debian".
        name: The package's name there.
        version: The exact version.
        archive: The file name of the archive: a source archive, a wheel or a .deb.
        sha256: Of that file, as 64 hexadecimal digits.
        licence: An SPDX expression over ALLOWED_LICENCES.
        domains: What kind of text it gives.
        paths: Patterns of the files that count, relative to the archive's top folder, where `*` also matches "/";
            empty for the patterns of each domain.
        without: Patterns of files that do not count, beside those that never do.
        cap: Most characters that each domain gets from here; 0 for the cap of the domain.
        held_out: Whether all of it is kept from training.
        held_out_share: Share of its documents that are kept from training, chosen by their hash.
        notice: What the licence wants to be told wherever the text goes.
    """

    registry: str
    name: str
    version: str
    archive: str
    sha256: str
    licence: str
    domains: tuple[str, ...]
    paths: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    cap: int = 0
    held_out: bool = False
    held_out_share: float = 0.0
    notice: str = ""

    def __post_init__(self) -> None:
        self._require(self.registry in ("pypi", "debian"), f"registry must be pypi or debian, not {self.registry!r}")
        self._require(bool(re.fullmatch(r"[0-9a-f]{64}", self.sha256)), "sha256 must be 64 hexadecimal digits")
        self._require(bool(self.version and self.archive), "version and archive must be given")
        self._require(bool(self.domains) and set(self.domains) <= set(DOMAINS), f"domains must be among {DOMAINS}")
        refused = sorted(licences_of(self.licence) - ALLOWED_LICENCES)
        self._require(not refused, f"licence {' and '.join(refused)} is not among those allowed")
        self._require(0 <= self.held_out_share < 1, "held_out_share must be at least 0 and below 1")

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"source {self.name!r}: {rule}")

    @property
    def label(self) -> str:
        """Name and version, as documents tell where they come from."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, kw_only=True)
class SourceList:
    """All sources, and the rules that hold where a source has none of its own.

    Attributes:
        paths: Per domain, patterns of the files that count.
        never: Patterns of files that never count.
        caps: Per domain, the most characters from one source.
        sources: In the order of the file.
    """

    paths: dict[str, tuple[str, ...]]
    never: tuple[str, ...]
    caps: dict[str, int]
    sources: tuple[Source, ...] = field(default=())

    def wants(self, source: Source, domain: str, path: str) -> bool:
        """Return whether the file at `path` in the archive of `source` counts for `domain`."""
        if not _matcher(source.paths or self.paths.get(domain, ("*",))).match(path):
            return False
        # A leading slash lets a pattern such as */tests/* meet a folder at the top as well.
        return not _matcher((*self.never, *source.without)).match(f"/{path}")


@cache
def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or "(?!)")  # no pattern matches nothing


def licences_of(expression: str) -> set[str]:
    """Return the licence names in an SPDX expression; of alternatives, those that are allowed, if any is."""
    names = set()
    for part in expression.split(" AND "):
        choices = set(part.strip("() ").split(" OR "))
        names |= choices & ALLOWED_LICENCES or choices
    return names


def load_sources(path: Path) -> SourceList:
    """Read and check the list.

    Raises:
        ValueError: If an entry has an unknown key, lacks one or breaks a rule of `Source`, or if two entries are alike.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = tuple(_source(entry) for entry in table["source"])
    seen: set[tuple[object, ...]] = set()
    for source in sources:
        key = (source.registry, source.name, source.paths)
        if key in seen:
            raise ValueError(
                f"source {source.name!r} stands twice in {path.name} with the same paths: drop one of them"
            )
        seen.add(key)
    return SourceList(
        paths={domain: tuple(patterns) for domain, patterns in table["paths"].items()},
        never=tuple(table["never"]["files"]),
        caps=table["caps"],
        sources=sources,
    )


def _source(entry: dict[str, object]) -> Source:
    name = entry.get("name", "without a name")
    unknown = set(entry) - {known.name for known in fields(Source)}
    if unknown:
        raise ValueError(f"source {name!r} has unknown keys: {', '.join(sorted(unknown))}")
    missing = {"registry", "name", "version", "archive", "sha256", "licence", "domains"} - set(entry)
    if missing:
        raise ValueError(f"source {name!r} lacks {', '.join(sorted(missing))}")
    return Source(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})  # type: ignore[arg-type]
