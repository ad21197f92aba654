"""Commands that read stored runs, on the data that a real store left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
import torch
from cli.conftest import RunFiles
from cli.recorded import SAMPLE_ID, batch_record, sample, vertices
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.cli import main as cli_main
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import STORE, ClusterSettings
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.runs import RunSource, store_run
from flexmarl.client.store import StoreClient
from flexmarl.client.trajectory_schema import TABLES

RUN = "team-1"
POLICIES = ("splitter", "sorter", "merger")


def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


async def store_weights(store: StoreClient, weights: dict[str, torch.Tensor]):
    specs = [BufferSpec(name, "F32", tuple(t.shape)) for name, t in weights.items()]
    async with store.allocate_segment(RUN, "weights0", specs) as segment:
        for name, tensor in weights.items():
            segment.buffers[name].data[:] = tensor.contiguous().numpy().tobytes()
        checksum = segment.content_hash()
        ref = await segment.seal(checksum=checksum)
    return graph_pb2.PolicyManifest(weights=ref, weights_hash=checksum, num_updates=1)


async def fill(store: StoreClient, files: RunFiles) -> graph_pb2.Run:
    stats = await store.get_stats()
    home = common_pb2.ShardAddress(name=stats.shard, address=store.address)
    source = RunSource(
        run_id=RUN,
        config_json=b'{"name": "team"}',
        portable_config_json=b"{}",
        package=files.flow.parent,
        exclude=(),
        dataset=files.dataset,
        models=dict.fromkeys(POLICIES, files.model),
    )
    run = await store_run(store, source, shards=[home])
    assert await store_run(store, source, shards=[home]) == run  # again changes nothing
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    group = graph_pb2.Group(
        group_id="b000000a0-g0000",
        query_json=b'{"digits": "3102"}',
        num_samples=1,
        status=common_pb2.GROUP_STATUS_OPEN,
        opened_unix_ns=1,
    )
    opened = graph_pb2.Sample(
        sample_id=SAMPLE_ID, group_id=group.group_id, status=common_pb2.SAMPLE_STATUS_OPEN
    )
    await store.write_graph(RUN, term=term, groups=[group], samples=[opened])
    rows = vertices()
    for row in rows:  # what closing the group writes cannot be written before
        for field in ("reward", "advantage", "micro_batch_id", "void_reason"):
            row.meta.ClearField(field)
    await store.write_graph(RUN, term=term, vertices=rows, samples=[sample()])
    weights = await store_weights(store, model().state_dict())
    for version in range(2):
        manifest = graph_pb2.Manifest(
            version=version, term=term, policies=dict.fromkeys(POLICIES, weights)
        )
        if version:
            manifest.batch.CopyFrom(batch_record(0, 0.25))
        await store.commit(RUN, manifest, expected_version=version - 1 if version else None)
    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a stored run, whose store runs."""
    base = tmp_path_factory.mktemp("stored")
    files = RunFiles(base / "run")
    model().config.save_pretrained(files.model)
    shm = Path("/dev/shm") / f"flexmarl-test-reading-{os.getpid()}"
    folder = ClusterFolder(base / "cluster")
    settings = ClusterSettings(overrides=(f"meg_store.store.shm_dir={shm}",))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def in_loop(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=50)

    async def start() -> LocalCluster:
        cluster = LocalCluster(folder, settings, tell=print, names=(STORE,))
        await cluster.start()
        async with StoreClient.connect(cluster.address(STORE)) as store:
            await fill(store, files)
        return cluster

    try:
        cluster = in_loop(start())
        yield folder
        in_loop(cluster.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        shutil.rmtree(shm, ignore_errors=True)


@pytest.fixture
def flexmarl(stored, monkeypatch, capsys):
    """Run a command on the stored run; returns exit code and both outputs."""

    def run(*args: str) -> tuple[int, str, str]:
        command = ["flexmarl", *args, "--data-dir", str(stored.path)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_runs_lists_the_run(flexmarl):
    code, out, _ = flexmarl("runs")
    assert code == 0
    header, row = out.splitlines()
    assert header.split() == ["run", "status", "version", "created"]
    assert row.split()[:3] == [RUN, "submitted", "1"]


def test_show_as_json(flexmarl):
    code, out, _ = flexmarl("show", RUN, "--json")
    assert code == 0
    data = json.loads(out)
    assert data["run"] == RUN
    assert data["config"] == {"name": "team"}
    assert [entry["policy"] for entry in data["policies"]] == sorted(POLICIES)
    assert data["versions"][0]["team_reward"] == 0.25
    assert (data["versions"][0]["consumed"], data["versions"][0]["void"]) == (8, 2)
    assert data["samples"][0]["sample"] == SAMPLE_ID


def test_graph_draws_the_sample_by_a_prefix_of_its_id(flexmarl):
    code, out, err = flexmarl("graph", RUN, SAMPLE_ID[:-2])
    assert code == 0, err
    assert '"01" → "1>"' in out
    assert 'query  {"digits": "3102"}' in out
    assert "(needs 0.0:0, 0.1:0)" in out
    assert "team reward 0.750" in out


def test_export_gives_the_weights_of_the_segment(flexmarl, tmp_path):
    out = tmp_path / "exported"
    code, said, err = flexmarl("export", RUN, "--policy", "sorter", "--out", str(out))
    assert code == 0, err
    assert said == f"policy sorter at version 1: {out}\n"
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).state_dict()
    want = model().state_dict()
    assert loaded.keys() == want.keys()
    assert all(torch.equal(loaded[name], want[name]) for name in want)


def test_timeline_has_the_requests_and_the_batch(flexmarl, tmp_path):
    out = tmp_path / "trace.json"
    code, _, err = flexmarl("timeline", RUN, "--out", str(out))
    assert code == 0, err
    events = json.loads(out.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("sorter") == 2
    assert "batch 0" in names


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("show", "nothing"), f"stored here: {RUN}"),
        (
            ("show", RUN, "--batch", "7"),
            "no samples of that batch",
        ),
        (("runs", "delete", "nothing"), "nothing"),
        (("vertices", RUN, "--agent", "sotrer"), "it has: merger, sorter, splitter"),
        (("vertices", RUN, "--policy", "sotrer"), "it has: merger, sorter, splitter"),
        (("graph", RUN, "b000009"), "b000009"),
        (("graph", RUN, SAMPLE_ID, "--format", "pdf"), "use one of text, dot, mermaid, json"),
        (("export", RUN, "--policy", "solver", "--out", "x"), "it has: merger, sorter, splitter"),
        (("export", RUN, "--policy", "sorter", "--version", "9", "--out", "x"), "version 9"),
        (("timeline", "nothing", "--out", "x"), "nothing"),
    ],
)
def test_what_is_not_there_is_named(flexmarl, tmp_path, monkeypatch, args, why):
    monkeypatch.chdir(tmp_path)
    code, _, err = flexmarl(*args)
    assert code == 2
    assert err.startswith("error: ")
    assert why in err
    assert list(tmp_path.iterdir()) == []


def test_stored_runs_are_read_without_a_cluster(tmp_path, monkeypatch, capsys):
    folder = ClusterFolder(tmp_path / ".flexmarl")
    folder.service(STORE).mkdir(parents=True)
    settings = ClusterSettings(overrides=(f"meg_store.store.shm_dir={tmp_path / 'shm'}",))
    folder.settings_file.write_text(json.dumps(settings.to_json()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flexmarl", "runs"])
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    assert not ended.value.code
    assert capsys.readouterr().out == "no runs are stored here\n"
    assert not folder.cluster_file.exists()


def test_vertices_by_filter_as_json(flexmarl):
    code, out, err = flexmarl("vertices", RUN, "--agent", "sorter", "--order", "tokens", "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert [row["agent"] for row in rows] == ["sorter", "sorter"]
    assert rows[0]["sample"] == SAMPLE_ID
    code, out, _ = flexmarl("vertices", RUN, "--version", "1..", "--json")
    assert json.loads(out) == []
    code, out, _ = flexmarl("vertices", RUN, "--limit", "1")
    assert "there are more" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--version", "x"),
        ("--version", "-1"),
        ("--reward", "nan"),
        ("--status", "asleep"),
        ("--void", "bored"),
        ("--order", "beauty"),
        ("--since", "yesterday"),
    ],
)
def test_bad_filter_names_its_option(flexmarl, options):
    code, _, err = flexmarl("vertices", RUN, *options)
    assert code == 2
    assert options[0] in err
    assert options[1] in err


def test_graph_shows_critical_path_and_neighbours(flexmarl):
    code, out, err = flexmarl("graph", RUN, SAMPLE_ID, "--critical-path")
    assert code == 0, err
    assert "critical path" in out
    code, out, err = flexmarl("graph", RUN, SAMPLE_ID, "--around", "0.1:0", "--json")
    assert code == 0, err
    assert [v["path"] for v in json.loads(out)["vertices"]] == ["0:0", "0.1:0", "0:1"]
    code, _, err = flexmarl("graph", RUN, SAMPLE_ID, "--around", "9:9")
    assert code == 2
    assert "9:9" in err


def test_agents_shows_calls_and_degrees(flexmarl):
    code, out, err = flexmarl("agents", RUN, "--json")
    assert code == 0, err
    sorter = next(agent for agent in json.loads(out) if agent["agent"] == "sorter")
    assert (sorter["calls"], sorter["share"], sorter["max_per_sample"]) == (2, 0.5, 2)


def test_counts_recounts_committed_batches(flexmarl):
    code, out, err = flexmarl("counts", RUN, "--json")
    assert code == 1, err  # the recorded rows belong to no consumed micro-batch
    rows = json.loads(out)
    assert {row["policy"] for row in rows} == set(POLICIES)
    assert all(row["unaccounted"] == row["finished"] for row in rows)


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_export_trajectories_opens_with_duckdb_and_pyarrow(flexmarl, tmp_path, format_):
    out = tmp_path / "tables"
    code, said, err = flexmarl("export-trajectories", RUN, "--out", str(out), "--format", format_)
    assert code == 0, err
    assert said == f"{out}: 1 groups, 1 samples, 4 vertices, 4 edges\n"
    tables = {name: f"'{out}/{name}.{format_}'" for name in TABLES}
    with duckdb.connect() as db:
        for name, columns in TABLES.items():
            described = db.execute(f"describe select * from {tables[name]}").fetchall()
            assert [line[0] for line in described] == [column.name for column in columns]
        rows = db.execute(
            f"select v.path, v.response_tokens, v.logprobs, v.output_text, s.team_reward "
            f"from {tables['vertices']} v join {tables['samples']} s using (sample_id) "
            f"where v.agent = 'sorter' order by v.path"
        ).fetchall()
        assert rows == [(path, [1, 2], [-0.5, -0.25], "1>", 0.75) for path in ("0.0:0", "0.1:0")]
        joined = db.execute(
            f"select count(*) from {tables['edges']} e "
            f"join {tables['vertices']} v on v.vertex_id = e.upstream_vertex_id"
        ).fetchone()
        assert joined == (4,)
    if format_ == "parquet":
        schema = pq.read_schema(out / "vertices.parquet")
        names = {field.name: str(field.type) for field in schema}
        assert names["response_tokens"] == "list<element: uint32>"
        samples = pq.read_table(out / "samples.parquet").to_pylist()
        assert samples[0]["output_json"] == '"0123"'
    code, _, err = flexmarl("export-trajectories", RUN, "--out", str(out))
    assert code == 2
    assert "exists already" in err


def test_export_in_an_unknown_format_is_refused(flexmarl, tmp_path):
    out = tmp_path / "tables"
    code, _, err = flexmarl("export-trajectories", RUN, "--out", str(out), "--format", "csv")
    assert code == 2
    assert "parquet, jsonl" in err
    assert not out.exists()


def test_snapshot_check_and_restore(flexmarl, tmp_path):
    code, out, err = flexmarl("store", "snapshot", "--name", "s1", "--json")
    assert code == 0, err
    snapshot = json.loads(out)["path"]
    code, _, err = flexmarl("store", "check")
    assert code == 2
    assert "runs" in err
    code, out, err = flexmarl("store", "check", snapshot, "--json")
    found = json.loads(out)["findings"]
    # The recorded batch states counts that its rows do not have: that, and nothing else.
    assert {finding["kind"] for finding in found} == {"count"}
    assert code == 1
    target = tmp_path / "restored"
    code, out, err = flexmarl("store", "restore", snapshot, "--store-dir", str(target))
    assert code == 0, err
    assert (target / "db").is_dir()
