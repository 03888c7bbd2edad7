"""What a gain on one GPU becomes on a cluster: the rows of benchmarks/scale.py."""

from pathlib import Path

from benchmarks.figures import style, words
from benchmarks.figures.style import FAINT, beside, ratio_axis, rows_page


def draw(rows: list[dict], model: str, variant: str, found: list[dict], folder: Path) -> Path:
    """Write scale-MODEL.svg and .png below `folder`; the path of the former. rows: of `benchmarks.scale.rows`."""
    with style.applied():
        return style.save(page(rows, model, variant, found), folder, f"scale-{model}")[0]


def page(rows: list[dict], model: str, variant: str, found: list[dict]) -> style.Page:
    """A line from spread to burst for each cluster, its interval, and the published ratio as a diamond."""
    shown = {host: [row for row in rows if row["host"] == host and row["ratios"]] for host in ("quiet", "busy")}
    shown = {host: own for host, own in shown.items() if own}
    panels = [
        (
            f"{host} host",
            f"runs of eager + {variant}, hosts: {own[0]['count']}; times of {own[0]['times']}",
            [_name(row) for row in own],
        )
        for host, own in shown.items()
    ]
    page, every = rows_page(
        _title(words.of_model(model), shown),
        "Eager's mean step over the graphed one's, simulated from steps of single GPUs. Thick: between delays that are "
        "spread over what was timed and those in one burst; thin: 95 %, over runs. Diamond: published by NVIDIA.",
        ", ".join(words.versions([record["env"] for record in found])),
        panels,
        f"eager's step over {variant}'s (log scale)",
        ["1.000x to 1.000x"],
    )
    ends = [
        value for own in shown.values() for row in own for value in (*row["ratios"].values(), row["published"] or 1)
    ]
    for axes, own in zip(every, shown.values(), strict=True):
        ratio_axis(axes, "x", min(ends) / 1.03, max(ends) * 1.03)
        axes.axvline(1, color=FAINT, linewidth=0.9)
        for y, row in enumerate(own):
            colour = style.look(variant)[0]
            got = row["ratios"]
            if "low" in got:
                axes.plot([got["low"], got["high"]], [y, y], color=colour, linewidth=1)
            low, high = sorted((got["spread"], got["burst"]))
            axes.plot([low, high], [y, y], color=colour, linewidth=5, solid_capstyle="round")
            if row["published"]:
                axes.plot(row["published"], y, "D", color=style.INK, markersize=5)
            beside(axes, y, f"{low:.3f}x" + (f" to {high:.3f}x" if high > low else ""))
    return page


def _name(row):
    return f"{row['gpus']:,} GPU{'s' if row['gpus'] > 1 else ''}"


def _title(model, shown):
    host, own = next(iter(shown.items()))
    low, high = sorted(own[-1]["ratios"][spread] for spread in ("spread", "burst"))
    return (
        f"{model}: {own[0]['ratios']['spread']:.3f}x on one GPU of a {host} host would be {low:.2f}x to {high:.2f}x "
        f"on {own[-1]['gpus']:,}"
    )
