"""The text of numbers in tables: of a run's own table, and of the suite's pages. None and NaN have no text."""

from graph_worth.text import digits

GIB = 2**30
# Where the most that a graph can gain is not known, and the reason is.
NO_CEILING = "no ceiling"


def is_missing(value) -> bool:
    """Return whether a value of a table is None or NaN."""
    return value is None or value != value


def cell(value: float | None, form: str = "", unit: str = "") -> str:
    """Return a number in a format, such as ".3f", with its unit; by default with three digits or more."""
    if value is None or value != value:
        return ""
    return f"{format(value, form) if form else digits(value)}{unit}"


def milliseconds(value: float | None) -> str:
    """Return a time with three digits or more; - where there is none."""
    return cell(value) or "-"


def times(value: float | None) -> str:
    """Return 1.234x."""
    return cell(value, ".3f", "x")


def gib(size: float | None, places: int = 1) -> str:
    """Return bytes as GiB."""
    return "" if size is None or is_missing(size) else cell(size / GIB, f".{places}f")


def percent(share: float | None, places: int = 0) -> str:
    """Return a share as 97 %."""
    return "" if share is None or is_missing(share) else cell(100 * share, f".{places}f", " %")


def interval(low: float | None, high: float | None) -> str:
    """Return the ends of an interval, as in 1.002 to 1.005."""
    return " to ".join(filter(None, (cell(low, ".3f"), cell(high, ".3f"))))


def span(low: float | None, high: float | None, form: str = "", unit: str = "") -> str:
    """Return a range as in 1.62 to 2.86x; one number where both ends read the same."""
    ends = cell(low, form), cell(high, form)
    return f"{' to '.join(dict.fromkeys(ends))}{unit}" if all(ends) else ""


def beside(
    low: float | None,
    high: float | None,
    quiet: tuple[float | None, float | None],
    form: str = ".3f",
    words: str = "beside other work",
) -> str:
    """Return the range beside other work, behind the range `quiet`: its upper end alone where that is the news."""
    if low is None or high is None or is_missing(low):
        return ""
    end, (quiet_low, quiet_high) = cell(high, form, "x"), quiet
    is_news = quiet_high is not None and high > quiet_high and end != cell(quiet_high, form, "x")
    if is_news and quiet_low is not None and low >= quiet_low:
        return f"{words} to {end}"
    return f"{words} {span(low, high, form, 'x')}"


def with_span(value: float | None, low: float | None, high: float | None) -> str:
    """Return a number with its range over hosts, as in 127.0 (126.8 to 129.0)."""
    over = span(low, high)
    return f"{cell(value)} ({over})" if " to " in over else cell(value)


def counted(number: int, word: str) -> str:
    """Return 1 host, or 2 hosts."""
    return f"{number} {word}{'s' if number != 1 else ''}"


def hosts_text(number: int, archived: int = 0, unknown: int = 0, word: str = "") -> str:
    """Return one host, two archived hosts, or 7 hosts (3 archived, 2 unknown); `word` in the place of host."""
    marks = {"archived": archived, "unknown": unknown}
    same = next((f"{mark} " for mark, marked in marks.items() if marked == number), "")
    number_text = {1: "one", 2: "2" if word else "two"}.get(number, str(number))
    text = f"{number_text} {same}{word or ('host' if number == 1 else 'hosts')}"
    parts = ", ".join(f"{marked} {mark}" for mark, marked in marks.items() if marked)
    return text if same or not parts else f"{text} ({parts})"
