"""What the documents say of the server is so: its examples run, its lists are complete."""

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from http_rig import live_server

from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.middleware import OPEN_PATHS
from gdn_jax.serving.http.openapi import document
from gdn_jax.serving.http.schemas import ChatCompletionRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[3]
README, PAGE = (ROOT / "README.md").read_text(), (ROOT / "docs" / "http.md").read_text()


@pytest.fixture(scope="module")
def tiny():
    with live_server(served_model_name=("pico",)) as found:
        yield found


def test_the_example_with_the_official_client_prints_an_answer(tiny) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL)
    code = code.replace("http://localhost:8000", tiny.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 16


def test_what_the_example_with_curl_sends_gets_an_answer(tiny) -> None:
    (code,) = re.findall(r"```sh\n(curl .*?)```", README, flags=re.DOTALL)
    sent = shlex.split(code)
    place = next(word for word in sent if word.startswith("localhost"))
    header, body = (sent[sent.index(option) + 1] for option in ("-H", "-d"))
    name, _, value = header.partition(": ")
    answer = tiny.post(place.removeprefix("localhost:8000"), content=body.encode(), headers={name: value})
    assert answer.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_every_parameter_is_on_the_page(kind: type[CompletionRequest | ChatCompletionRequest]) -> None:
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in PAGE] == []


def test_every_endpoint_and_open_path_is_on_the_page() -> None:
    for path in [*document()["paths"], *OPEN_PATHS]:
        assert path.replace("{model}", "NAME") in PAGE


def test_flags_that_the_page_names_exist() -> None:
    known = {item.name.replace("_", "-") for item in fields(ServerConfig)} | {
        "warm-up",
        "speculative-tokens",
        "help",
        "model",
    }
    assert set(re.findall(r"--([a-z][a-z-]+)", PAGE)) <= known


def test_the_server_loads_on_a_machine_without_jax() -> None:
    blocked = "import sys\nfor name in ('jax', 'jaxlib', 'flax', 'numpy'): sys.modules[name] = None\n"
    modules = [path.stem for path in (ROOT / "serving" / "http").glob("*.py") if path.stem != "__init__"]
    code = blocked + "\n".join(f"import gdn_jax.serving.http.{name}" for name in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(modules) > 15
