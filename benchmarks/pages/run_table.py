"""The end of `make bench`: one table of a run, and the lines below it, in words that need no glossary."""

import textwrap

from benchmarks import statistics
from benchmarks.files.run_file import OWN_STEP, Build, Run, printable

COLUMNS = ("variant", "base ms", "ms", "ratio", "95 %", "issue ms", "busy ms", "parity")
FINE = ("pass", "oom", "unsupported")


def report(run: Run) -> str:
    """Return the tables of all builds and lines that explain them, of at most 100 characters but for reasons."""
    parts = [_build_report(run, name, build) for name, build in run.builds.items()]
    text = "\n\n".join(part for part in parts if part)
    said = "On a CPU this shows that the variants train alike. It says nothing about the speed of a GPU."
    timed = any(own.blocks for build in run.builds.values() for own in build.variants.values())
    return f"{text}\n{said}" if run.device == "cpu" and timed else text


def build_title(name: str, fields: dict) -> str:
    """Return a build's name and flags, as in validate (--validate-every 4); "" for the preset itself."""
    flags = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in fields.items())
    return f"{name} ({flags})" if name else ""


def is_sound(run: Run) -> bool:
    """Return whether no variant failed and something was timed."""
    variants = [own for build in run.builds.values() for own in build.variants.values()]
    return all(own.status in FINE for own in variants) and any(own.blocks for own in variants)


def milliseconds(value: float | None) -> str:
    """Return a time with three digits or more; - for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def rates(run: Run, build: Build) -> str:
    """Return the FLOP of a step, how they were counted and, of a GPU, each variant's rate; "" where none are known."""
    notes = [note for note in build.notes if note.startswith("FLOP")]
    if not build.flops_per_step:
        return printable(". ".join(notes))
    parts = [f"{build.flops_per_step / 1e12:.3g} TFLOP a step of each rank"]
    for name, own in build.variants.items() if run.device == "cuda" else ():
        times = [((block.step_ms,), block.step_ms) for block in own.blocks if not block.busy_processes]
        if own.status == "pass" and times and name != run.control:
            rate = build.flops_per_step / statistics.ratio_of(times).base_ms / 1e9
            parts.append(f"{name} {rate:.3g} TFLOP/s")
    return printable(". ".join([f"{', '.join(parts)} ({build.flops_convention})", *notes]))


def suite(runs: list[Run]) -> str:
    """Return one table of several models: the headline graphs of each."""
    rows = [("workload", "variant", *COLUMNS[1:5])]
    for run in runs:
        for build_name, build in run.builds.items():
            for name, own in build.variants.items():
                ratio = build.ratio_of(name) if own.headline and own.status == "pass" else None
                if ratio is not None:
                    rows.append((f"{run.title} {build_name}".rstrip(), name, *_cells(ratio)))
    return "\n".join(_aligned(rows, 2))


def _build_report(run, name, build):
    blocks = [block for own in build.variants.values() for block in own.blocks]
    if not blocks:
        return _faults(build)
    lines = [f"{build_title(name, build.fields)}:"] if name else []
    number = max(block.busy_processes for block in blocks)
    for busy in sorted({bool(block.busy_processes) for block in blocks}):
        lines += [f"beside {number} busy processes:" if busy else "quiet cycles:"] if number else []
        lines += _table(run, build, busy)
    rate = textwrap.fill(rates(run, build), 100) if run.model == OWN_STEP else ""
    lines += [text for text in (_faults(build), _reruns(build), _meaning(run, build), rate) if text]
    return "\n".join(lines)


def _table(run, build, busy):
    rows = [COLUMNS]
    for name, own in build.variants.items():
        times = [((block.step_ms,), block.step_ms) for block in own.blocks if bool(block.busy_processes) == busy]
        ratio = build.ratio_of(name, busy)
        if own.status != "pass" or not times or (ratio is None and name != build.base):
            continue
        parity = "" if name == run.control or own.parity is None else own.parity.result or "not compared"
        tail = (milliseconds(own.issue_ms(busy)), milliseconds(own.profile.get("busy_ms")), parity)
        base_ms = milliseconds(statistics.ratio_of(times).base_ms)
        cells = _cells(ratio) if ratio else ("", base_ms, "base", "")
        rows.append((f"{name} (base again)" if name == run.control else name, *cells, *tail))
    return _aligned(rows, 1)


def _cells(ratio):
    interval = f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio.cycles > 1 else ""
    return milliseconds(ratio.base_ms), milliseconds(ratio.variant_ms), f"{ratio.ratio:.3f}x", interval


def _aligned(rows, num_left):
    """Lines of a table whose first `num_left` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:num_left], widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(row[num_left:], widths[num_left:], strict=True)]
        yield "  ".join(cells).rstrip()


def _faults(build):
    alike: dict = {}
    for name, own in build.variants.items():
        if own.reason:
            alike.setdefault((own.status, own.reason), []).append(name)
    lines = (f"{status}: {', '.join(names)} ({reason})" for (status, reason), names in alike.items())
    return "\n".join(map(printable, lines))


def _reruns(build):
    """A line for each variant that may run steps again."""
    lines = []
    for name, own in build.variants.items():
        counted = [block.reruns for block in own.blocks if block.reruns and own.status == "pass"]
        steps, reruns = (sum(each.get(key) or 0 for each in counted) for key in ("steps", "reruns"))
        if steps:
            total_ms = sum((each.get("rerun_ms") or 0.0) * (each.get("reruns") or 0) for each in counted)
            cost = f", which took {milliseconds(total_ms / reruns)} ms each" if reruns else ""
            lines.append(f"{name}: {reruns} of {steps:,} timed steps ran again without fixed buffers{cost}.")
    return "\n".join(lines)


def _meaning(run, build):
    if run.device == "cpu":
        return ""
    base, lines = build.variants.get(build.base), []
    predicted = build.predicted_gain(build.base) if base else None
    if predicted is not None:
        lines.append(
            f"The host needs {milliseconds(base.issue_ms())} ms to issue a step of {build.base}, the GPU "
            f"{milliseconds(base.profile['busy_ms'])} ms to run it: graphs can gain {predicted:.2f}x at most, less "
            "where the GPU clocks lower without pauses."
        )
    for name, own in build.variants.items():
        ratio = build.ratio_of(name) if own.status == "pass" and own.kind != "eager" else None
        if ratio is not None and ratio.cycles > 1:
            predicted = build.predicted_gain(name)
            more = f"; predicted from issue and its own GPU time: {predicted:.2f}x" if predicted else ""
            within = f"to within {100 * ratio.half_width:.1f} %"
            lines.append(f"{name}: {statistics.word(ratio)} on this host in these minutes, {within}{more}.")
    return "\n".join(lines)
