"""results/archive/hosts.json agrees with the archived files that it was made from; and faults of such a file."""

import json
import lzma
from collections import defaultdict
from statistics import fmean, geometric_mean

import pytest

from benchmarks import archive
from benchmarks.archive import ArchivedHost
from graph_worth.folders import ROOT
from graph_worth.harness.files.workload import Workload

ARCHIVE = ROOT / "results" / "archive"
# Names of today, as results/archive/README.md has them.
NAMES = {"one_graph": "graph_step", "full_step": "graph_step", "graph_te": "graph_layer_te"}
NAMES_OF_MODELS = {
    "gpt3": {"graph": "graph_layer"},
    "llama2_lora": {"graph": "graph_layer"},
    "llama31": {"graph": "graph_fwd_bwd", "chunk": "graph_microbatch", "layer": "graph_layer"},
    "rnnt": {"graph": "graph_networks", "full": "graph_step"},
    "stable_diffusion": {"graph": "graph_step", "lightning_graph": "graph_step_lightning"},
}


def archived_runs():
    """(workload, boot, folder) -> variant -> its records that passed and have times, in the order of their sessions."""
    found = defaultdict(lambda: defaultdict(list))
    for path in sorted(ARCHIVE.glob("*/*/*/records.jsonl.xz")):
        folder = path.parent.parent
        for record in map(json.loads, lzma.decompress(path.read_bytes()).splitlines()):
            env = record["env"]
            if record["status"] != "pass" or not record["steps"]["gpu_ms"] or not env.get("boot_id"):
                continue
            model, preset = record["model"], record["preset"]
            label = folder.name.removeprefix(f"{model}-{preset}").strip("-")
            gpus = env.get("world_size") or 1
            where = Workload(env["gpu_name"], gpus, model, preset, label, busy=record["host_load"])
            names = NAMES | NAMES_OF_MODELS[model]
            variant = names.get(record["variant"], record["variant"])
            found[where, env["boot_id"], folder][variant].append(record)
    return found


def test_the_hosts_are_those_of_the_archived_files():
    entries, faults = archive.read(ARCHIVE)
    assert not faults
    hosts = {(where, host.boot, host.folder): host for where, own in entries.items() for host in own}
    archived = {key: own for key, own in archived_runs().items() if any(run["num_kernels"] for run in own["eager"])}
    assert hosts.keys() == archived.keys()
    for key, host in hosts.items():
        own = {name: records for name, records in archived[key].items() if records}
        means = {name: [fmean(record["steps"]["gpu_ms"]) for record in records] for name, records in own.items()}
        assert host.ms == pytest.approx({name: geometric_mean(ms) for name, ms in means.items()}, rel=1e-12), key
        counts = {name: [record["num_kernels"] for record in records] for name, records in own.items()}
        assert host.kernels == {name: list(filter(None, each))[-1] for name, each in counts.items() if any(each)}, key
        memory = {name: [record.get("memory") or {} for record in records] for name, records in own.items()}
        peaks = {name: max(each.get("peak_reserved_bytes") or 0 for each in parts) for name, parts in memory.items()}
        assert host.reserved_bytes == {name: peak for name, peak in peaks.items() if peak}, key


def test_an_archive_without_hosts_has_none_and_a_damaged_one_is_a_line(tmp_path):
    assert archive.read(tmp_path) == ({}, [])
    where = Workload("NVIDIA H200", 2, "rnnt", "bench", "persistent", busy=16)
    host = {"boot": "x", "kernels": {"eager": 300}, "ms": {"eager": 15.0}, "folder": "h200x2/rnnt-bench-persistent"}
    workload = {"gpu": "NVIDIA H200", "ranks": 2, "model": "rnnt", "preset": "bench", "label": "persistent", "busy": 16}
    whole = json.dumps([{"workload": workload, "hosts": [host]}])
    (tmp_path / "hosts.json").write_text(whole)
    made = ArchivedHost("x", {"eager": 300}, {"eager": 15.0}, folder=tmp_path / "h200x2/rnnt-bench-persistent")
    assert archive.read(tmp_path) == ({where: [made]}, [])
    for damaged in (whole[:-9], whole.replace("15.0", '"\x1b"'), whole.replace('"h200x2', '7, "'), "{}", "\udcff"):
        (tmp_path / "hosts.json").write_bytes(damaged.encode(errors="surrogateescape"))
        found, (fault,) = archive.read(tmp_path)
        assert not found and fault.isprintable()
        assert fault.startswith(f"{tmp_path}/hosts.json: no hosts of the archive (")
