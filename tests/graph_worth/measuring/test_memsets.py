"""Tests of llama31/README.md on a graph's launch and memset nodes: recomputed from the profiles of the archive."""

import gzip
import json
import lzma
from pathlib import Path

ARCHIVE = Path(__file__).resolve().parents[3] / "results" / "archive"
LIMIT = 512


def launches():
    """Yield, for timed runs of one graph launch a step: memsets, those that start after issue time, issue ms."""
    for path in sorted(ARCHIVE.rglob("records.jsonl.xz")):
        for record in map(json.loads, lzma.decompress(path.read_bytes()).decode().splitlines()):
            # The second graph of Llama 3.1 is the validation's; other variants with two graphs launch both.
            graphs = 2 if record["model"] == "llama31" else 1
            if not record["round"] or record["capture"]["num_graphs"] != graphs or not record["busy_ms"]:
                continue
            attempt = f".a{record['attempt']}" if record.get("attempt", 1) > 1 else ""
            trace = path.with_name(f"{record['variant']}.r{record['round']}{attempt}.trace.json.gz")
            if trace.exists():
                events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
                starts = [event["ts"] / 1e3 for event in events if event["cat"] == "gpu_memset"]
                yield len(starts), sum(start > record["issue_ms"] for start in starts), record["issue_ms"]


def test_the_launch_of_a_graph_waits_until_512_of_its_memsets_are_left():
    found = list(launches())
    few = [(num, issue_ms) for num, _, issue_ms in found if num <= LIMIT]
    many = [(num, left) for num, left, _ in found if num > LIMIT]
    assert len(few) > 30 and max(num for num, _ in few) == 471 and max(issue_ms for _, issue_ms in few) < 4
    assert len(many) > 45 and min(num for num, _ in many) == 560
    assert (min(left for _, left in many), max(left for _, left in many)) == (491, 523)
