"""Useful TFLOP/s of a model against the GiB that it reserves, beside the rate that NVIDIA published."""

from collections import Counter

from benchmarks.figures import words
from benchmarks.figures.evidence import Block, Missing, main_variant, rates
from benchmarks.figures.style import FAINT, INK, Page, legend, legend_height, look
from benchmarks.overview_rows import short_gpu, suffix_of
from benchmarks.published import Rate, stem

MOST_PANELS = 3  # beside each other
LEFT, HEIGHT, BELOW, GAP = 0.7, 2.6, 0.8, 0.25  # inches


def throughput(blocks: list[Block], rate: Rate) -> Page:
    """A panel a preset, on equal axes; a mark a variant and folder, and a line at the rate.

    Raises Missing where no run on a quiet GPU says its FLOP and reserved memory.
    """
    members = [block.first for block in blocks if block.what[0] == rate.model and not block.first.load]
    found = [row for evidence in members for row in rates(evidence.whole, rate.model)]
    if not found:
        raise Missing(f"no run of {words.of_model(rate.model)} on a quiet GPU with FLOP and reserved memory")
    panels = _by_preset(found, rate.model)
    signs = sorted({row["variant"]: row for row in found}.values(), key=lambda row: (row["kind"], row["variant"]))
    variants = [row["variant"] for row in signs]
    num_lines, num = -(-len(panels) // MOST_PANELS), min(len(panels), MOST_PANELS)
    body = 0.35 + num_lines * (HEIGHT + BELOW) - 0.3
    page = Page(
        _title(panels, rate),
        "Model FLOP of a step over its median time, recomputed work not counted, against a GPU's peak of reserved "
        f"memory. Hollow: eager. Dashed: NVIDIA's {rate.tflops:,.0f} ({rate.where}). Named marks: of other GPUs or "
        "settings than the rest.",
        words.provenance(members),
        body + legend_height(variants, LEFT),
    )
    width = (page.WIDTH - LEFT - page.MARGIN - GAP * (num - 1)) / num
    for index, (preset, rows) in enumerate(panels.items()):
        x, y = LEFT + index % MOST_PANELS * (width + GAP), 0.35 + index // MOST_PANELS * (HEIGHT + BELOW)
        axes = page.axes(x, y, width, HEIGHT)
        page.heading(x, y, preset, f"{rows[0]['items']:,} {rows[0]['unit']} a step" if rows[0]["items"] else "")
        axes.set(xlim=_limits(row["peak_reserved_gib"] for row in found), xlabel="GiB reserved")
        axes.set_ylim(_limits([*(row["tflops"] for row in found), rate.tflops]))
        axes.grid(True)
        if index % MOST_PANELS:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("useful TFLOP/s a GPU")
        axes.axhline(rate.tflops, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), gid="published")
        for row in rows:
            _mark(axes, row, variants)
        _name_marks(axes, rows)
    lines = [axes.plot([], [], label=row["variant"], **_style(row, variants))[0] for row in signs]
    legend(page, lines, LEFT, page.top + body)
    return page


def _by_preset(found, model):
    """Preset, as it was asked for -> its rows, the smaller step first. Each row gets a name: what its folder has that
    most have not, such as `H100, 75 layers` or `memory-gib-115`, or empty text."""
    [(usual, _)] = Counter(row["gpu"] for row in found).most_common(1)
    panels: dict[str, list[dict]] = {}
    for row in sorted(found, key=lambda row: (row["items"] or 0, row["gpu"] != usual, row["group"])):
        _, _, layers = row["preset"].partition("-l")
        name = [
            "" if row["gpu"] == usual else short_gpu(row["gpu"]),
            f"x{row['num_gpus']}" if row["num_gpus"] > 1 else "",
            f"{layers} layers" if layers else "",
            suffix_of(row["group"].rpartition("/")[2], model, row["preset"]),
        ]
        panels.setdefault(stem(row["preset"]), []).append(row | {"name": ", ".join(filter(None, name))})
    return panels


def _title(panels, rate):
    """What the variant that titles speak of reaches at each preset, in the folder with the shortest name."""
    parts, first = [], {}
    for preset, rows in panels.items():
        shortest = min((row["name"] for row in rows), key=len)
        plain = {row["variant"]: row for row in rows if row["name"] == shortest}
        main = plain.get(main_variant(list(plain.values()))) or next(iter(plain.values()))
        first = first or main
        name = f", {shortest}" if shortest else ""
        parts.append(f"{preset} {main['tflops']:,.0f} ({main['variant']}{name})")
    model = f"{words.of_model(rate.model)} on one {short_gpu(first['gpu'])}"
    return f"{model}, useful TFLOP/s: {', '.join(parts)}; NVIDIA {rate.tflops:,.0f}"


def _limits(values):
    values = list(values)
    room = max(0.12 * (max(values) - min(values)), 0.02 * max(values))
    return min(values) - room, max(values) + room


def _style(row, variants):
    colour, _, marker, _ = look(row["variant"], variants)
    face = "none" if row["kind"] == "eager" else colour
    return {"color": colour, "markerfacecolor": face, "marker": marker, "markersize": 6.5, "linestyle": ""}


def _mark(axes, row, variants):
    at = [row["peak_reserved_gib"]], [row["tflops"]]
    axes.plot(*at, zorder=3, gid=f"point-{row['variant']}", **_style(row, variants))


def _name_marks(axes, rows):
    """Below the lowest mark of each folder that has a name of its own."""
    lowest: dict[str, dict] = {}
    for row in sorted((row for row in rows if row["name"]), key=lambda row: -row["tflops"]):
        lowest[row["name"]] = row
    low, high = axes.get_xlim()
    for name, row in lowest.items():
        x = row["peak_reserved_gib"]
        side = "left" if x < low + 0.2 * (high - low) else "right" if x > high - 0.2 * (high - low) else "center"
        shift = {"left": -4, "center": 0, "right": 4}[side], -7
        place = {"textcoords": "offset points", "ha": side, "va": "top", "fontsize": 7.5, "color": FAINT}
        axes.annotate(name, (x, row["tflops"]), shift, **place)
