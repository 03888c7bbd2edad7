"""Words and numbers of figures: titles, rows and footers."""

import math

from benchmarks import intervals, tables

NAMES = {
    "gpt3": "GPT-3",
    "llama2_lora": "Llama 2 LoRA",
    "llama31": "Llama 3.1",
    "rnnt": "RNN-T",
    "stable_diffusion": "Stable Diffusion",
}
LARGE = 1.2  # from here on a ratio reads better than per cent
MAX_COMMITS = 4  # more are counted


def of_model(model: str) -> str:
    return NAMES.get(model, model)


def order(model: str) -> tuple:
    """Models with a name in its order, then others by theirs."""
    return (list(NAMES).index(model) if model in NAMES else len(NAMES)), model


def percent(ratio: float) -> str:
    """0.009 -> `0.9 %`: one digit behind the point below 10."""
    value = 100 * ratio
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def ms_text(ms: float) -> str:
    """137.2, 9.88, 0.0041, 2,500,000."""
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 0.1 else f"{ms:.2g}"


def verdict_words(row: dict | None) -> str:
    """What a row's interval bears, as the end of a sentence about the variant: `gains 0.9 %`, `is unclear`."""
    if row is None:
        return "was not measured"
    ratio, verdict = row["speedup"], row["verdict"]
    where = f" {tables.where(row)}".rstrip()
    if ratio is None:
        return f"has status {row['status']}" if row["status"] != "pass" else "has no eager run to compare with"
    if verdict in ("faster", "slower"):
        if ratio >= LARGE:
            words = f"is {ratio:.2f}x as fast"
        elif ratio > 1:
            words = f"gains {percent(ratio - 1)}"
        elif ratio > 1 / LARGE:
            words = f"loses {percent(1 - ratio)}"
        else:
            words = f"takes {1 / ratio:.2f}x as long"
        settled = intervals.bears(math.log(ratio), row["speedup_half_width"])
        return f"{words}{where}" if settled else f"is {verdict}{where}, by how much is not settled"
    if verdict == "same":
        return f"is the same within 0.5 %{where}"
    if verdict == "unclear":
        return "is unclear"
    return f"has no verdict ({verdict or 'fewer than 5 pairs on a host'})"


def status_text(row: dict, limit: int = 64) -> str:
    """`oom`, or `unsupported: reason`, cut at a word."""
    # An escape character would make the SVG unreadable.
    message = " ".join("".join(c if c.isprintable() else " " for c in row["message"]).split())
    if not message:
        return row["status"]
    text = f"{row['status']}: {message}"
    return text if len(text) <= limit else text[: limit - 3].rsplit(" ", 1)[0] + " ..."


def provenance(members) -> str:
    """What a figure stands on: GPU x count, versions, commit, rounds x steps; where folders differ, all of it.

    members: of `evidence.Evidence`.
    """
    runs = [record for evidence in members for record in evidence.runs]
    counts: dict[str, list[str]] = {}
    for evidence in sorted(members, key=lambda evidence: evidence.num_gpus):
        counts.setdefault(evidence.gpu_name, []).append(f"x{evidence.num_gpus}")
    parts = [" and ".join(f"{gpu} {', '.join(_distinct(several))}" for gpu, several in counts.items())]
    parts += versions([record["env"] for record in runs or [evidence.speaker for evidence in members]])
    if runs:
        rounds = span([evidence.num_rounds for evidence in members if evidence.runs])
        steps = span([len(record["steps"]["gpu_ms"]) for record in runs])
        parts.append(f"{rounds} round{'' if rounds == '1' else 's'} x {steps} steps")
    return ", ".join(parts)


def versions(envs: list[dict]) -> list[str]:
    """`torch 2.13.0`, `CUDA 13.0`, `driver 580.1`, `git 0123456789ab`: what of it is known, and all of it but commits
    beyond MAX_COMMITS, which the overview names."""
    values = {name: _distinct(env[name.lower()] for env in envs) for name in ("torch", "CUDA", "driver")}
    values["git"] = _distinct(
        env["git_sha"] and env["git_sha"][:12] + (" (changed)" if env.get("git_dirty") else "") for env in envs
    )
    if len(values["git"]) > MAX_COMMITS:
        values["git"] = [f"{len(values['git'])} commits"]
    return [f"{name} {' and '.join(each)}" for name, each in values.items() if each]


def _distinct(values):
    return list(dict.fromkeys(value for value in values if value))


def span(counts: list[int]) -> str:
    """`4`, or `1 to 6`."""
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
