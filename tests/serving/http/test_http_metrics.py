"""The metrics: names as documented, numbers that add up, vLLM's names on demand."""

from pathlib import Path

import pytest
from http_rig import LiveServer, chat, completion, live_server
from prometheus_client.parser import text_string_to_metric_families

from gdn_jax.serving import metrics

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "http.md"
# Names that dashboards and routers for vLLM read.
READ_BY_OTHERS = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
]


def samples(server: LiveServer) -> dict[str, list]:
    """Every sample by its exposed name, read by a Prometheus parser."""
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture(scope="module")
def compatible():
    with live_server(metrics_compat="vllm", served_model_name=("name",)) as found:
        yield found


def test_documented_names_are_the_exposed_ones(compatible: LiveServer) -> None:
    compatible.post("/v1/completions", completion(model="name"))
    found = samples(compatible)
    document = DOCUMENT.read_text()
    for metric in (*metrics.ENGINE, *metrics.SERVER):
        name = metrics.PREFIX + metric.name
        assert f"`{name}`" in document
        exposed = f"{name}_bucket" if metric.kind == "histogram" else name
        # the stub counts only some of what an engine does
        assert exposed in found or metric.field in ("gap_tokens", "prefilled_tokens", "saves", "saves_skipped",
                                                    "evictions", "steps", "failed_steps")  # fmt: skip
        assert not metric.vllm or f"`{metric.vllm}`" in document
    assert not [name for name in found if name.endswith("_created")]


def test_vllms_names_have_the_same_values_and_its_labels(compatible: LiveServer) -> None:
    compatible.post("/v1/completions", completion(model="name", n=2))
    found = samples(compatible)
    for name in READ_BY_OTHERS:
        assert name in found, name
        assert all(sample.labels["model_name"] == "name" for sample in found[name])
        assert all(sample.labels["engine"] == "0" for sample in found[name])
    for metric in (*metrics.ENGINE, *metrics.SERVER):
        if metric.vllm and metric.kind != "histogram":
            ours, theirs = found[metrics.PREFIX + metric.name], found[metric.vllm]
            assert [sample.value for sample in ours] == [sample.value for sample in theirs]
    finished = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success_total"]}
    assert set(finished) == {"stop", "length", "abort", "error"}


def test_vllms_names_are_absent_unless_asked_for(server: LiveServer) -> None:
    assert not [name for name in samples(server) if name.startswith("vllm")]


def test_tokens_and_times_add_up() -> None:
    with live_server() as server:
        used = [
            server.post("/v1/completions", completion(max_tokens=7, n=2, ignore_eos=True)).json()["usage"],
            server.post("/v1/chat/completions", chat(max_tokens=5, ignore_eos=True)).json()["usage"],
        ]
        server.post("/v1/completions", completion(temperature=-1))
        assert server.metric("gdn_jax_prompt_tokens_total") == sum(one["prompt_tokens"] for one in used)
        assert server.metric("gdn_jax_generation_tokens_total") == 19
        assert server.metric("gdn_jax_time_to_first_token_seconds_count") == 2
        assert server.metric("gdn_jax_inter_token_latency_seconds_count") == 6 + 6 + 4
        assert server.metric("gdn_jax_request_latency_seconds_count") == 2
        assert server.metric("gdn_jax_request_generation_tokens_sum") == 19
        assert server.metric("gdn_jax_completions_total") == 3
        text = server.get("/metrics").text
        assert 'gdn_jax_http_requests_total{path="/v1/completions",status="400"} 1.0' in text


def test_paths_that_clients_invent_make_no_new_series(server: LiveServer) -> None:
    before = len(samples(server)["gdn_jax_http_requests_total"])
    for index in range(20):
        server.get(f"/invented/{index}")
    assert len(samples(server)["gdn_jax_http_requests_total"]) <= before + 1


def test_two_servers_count_apart(server: LiveServer) -> None:
    with live_server() as other:
        other.post("/v1/completions", completion())
        assert other.metric("gdn_jax_completions_total") == 1
