"""The model card of pico says what was counted and measured, and its account of sources is whole and permissive."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.pico import DIALOGUES, DOMAINS
from scripts.gather_text.sources import ALLOWED_LICENCES, licences_of

ROOT = Path(__file__).resolve().parents[2]
PICO = ROOT / "gdn_jax" / "models" / "pico"
CARD = (PICO / "README.md").read_text(encoding="utf-8")
SOURCES = json.loads((PICO / "sources.json").read_text(encoding="utf-8"))
TOKENS = 655_360_000


def table(first: str) -> dict[str, dict[str, str]]:
    """Return the rows of the table whose header begins so, by their first cell, as {heading: cell}."""
    (lines,) = re.findall(rf"^\| {re.escape(first)} \|.*\n(?:\|.*\n)+", CARD, flags=re.MULTILINE)
    heading, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def results() -> dict[tuple[str, str], float]:
    rows = json.loads((ROOT / "benchmarks" / "results" / "pico.json").read_text())["rows"]
    return {(row["case"], row["metric"]): row["value"] for row in rows}


def test_every_source_is_under_a_licence_that_is_allowed() -> None:
    for row in SOURCES["sources"]:
        assert licences_of(row["licence"]) <= ALLOWED_LICENCES, row
    assert not any(word in name for name in ALLOWED_LICENCES for word in ("GPL", "-SA", "MPL", "EPL"))


def test_the_notices_stand_in_the_account_and_in_the_card() -> None:
    told = " ".join(CARD.replace("\n> ", "\n").split())
    assert {notice["source"].split()[0] for notice in SOURCES["notices"]} == {"wordnet-base"}
    assert all(notice["notice"] in told for notice in SOURCES["notices"])


def test_the_sums_are_those_of_the_sources() -> None:
    documents, characters = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in SOURCES["sources"]:
        documents[row["split"], row["domain"]] += row["documents"]
        characters[row["split"], row["domain"]] += row["characters"]
    sums = {(row["split"], row["domain"]): (row["documents"], row["characters"]) for row in SOURCES["sums"]}
    assert sums == {key: (documents[key], characters[key]) for key in documents}
    assert set(sums) == {(split, domain) for split in ("train", "held_out") for domain in DOMAINS}


def test_the_cards_table_of_text_is_the_account_and_the_config() -> None:
    rows = table("domain | what it is")
    assert tuple(rows) == DOMAINS
    weights = tomllib.loads((ROOT / "configs" / "train" / "pico.toml").read_text())["data"]["weights"]
    sums = {(row["split"], row["domain"]): row for row in SOURCES["sums"]}
    for domain, row in rows.items():
        for key, split in (("", "train"), ("held-out ", "held_out")):
            for what in ("documents", "characters"):
                assert number(row[key + what]) == sums[split, domain][what]
        assert number(row["share of the run"]) == weights[domain]
        assert number(row["passes"]) == pytest.approx(weights[domain] * TOKENS / number(row["tokens"]), abs=0.05)


def test_the_cards_table_of_licences_is_the_account() -> None:
    packages = {(row["licence"], row["registry"], row["name"], row["version"]) for row in SOURCES["sources"]}
    characters = Counter[str]()
    for row in SOURCES["sources"]:
        characters[row["licence"]] += row["characters"]
    counted = Counter(licence for licence, *_ in packages)
    rows = table("licence")
    assert {name: number(row["sources"]) for name, row in rows.items()} == counted
    assert {name: number(row["characters"]) for name, row in rows.items()} == characters


def test_the_cards_losses_are_those_that_were_measured() -> None:
    measured, rows = results(), table("domain | pico")
    assert tuple(rows) == (*DOMAINS, "all")
    for domain, row in rows.items():
        assert row["pico"] == f"{measured[f'pico/{domain}', 'nats_per_token']:.3f}"
        assert row["5-gram"] == f"{measured[f'pico/{domain}', 'ngram_nats_per_token']:.3f}"


def test_the_cards_tokens_per_verify_are_those_that_were_measured() -> None:
    measured, rows = results(), table("domain | greedy k=1")
    assert tuple(rows) == DOMAINS[:4]
    for domain, row in rows.items():
        for mode in ("greedy", "t0.8"):
            case = f"pico/{domain}/{mode}"
            assert row[f"{mode} distinct"] == f"{measured[f'{case}/k3', 'distinct_share']:.3f}"
            for drafts in (1, 2, 3):
                value = measured[f"{case}/k{drafts}", "tokens_per_verify"]
                assert row[f"{mode} k={drafts}"] == f"{value:.3f}"


def test_the_cards_answers_are_those_that_were_measured() -> None:
    measured, rows = results(), table("domain | ends by itself")
    assert tuple(rows) == (*DIALOGUES, "all")
    for domain, row in rows.items():
        assert row["ends by itself"] == f"{measured[f'pico/{domain}/greedy/k3', 'ends_by_itself']:.3f}"
        assert row["right"] == f"{measured[f'pico/{domain}/greedy/k3', 'right_answers']:.3f}"


def test_what_the_card_links_and_names_exists() -> None:
    links = [PICO / link for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", CARD)]
    names = [ROOT / name for name in re.findall(r"`((?:gdn_jax|scripts|configs|benchmarks)/[\w./-]+)`", CARD)]
    assert len(links) > 2
    assert len(names) > 3
    assert [str(path) for path in (*links, *names) if not path.exists()] == []
