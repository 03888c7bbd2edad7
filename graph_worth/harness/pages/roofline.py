"""The launch roofline: a graph gains where the host needs longer to issue a kernel than the GPU needs to run it.

With x = busy time / kernels of a step, and h = the host's time to issue the step / its kernels, a graph of the whole
step gains about max(1, h / x). docs/method.md says how far our runs lie from it, and what it leaves out.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graph_worth.harness.pages.cells import cell

if TYPE_CHECKING:  # `watch` needs no package
    from graph_worth.harness.judge import Judged

# The lines of a figure: hosts that need so many us to issue a kernel. Then its ticks.
HOSTS = (10, 20, 40, 80)
GAINS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
KERNELS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Errors that half, and three in four, of the graphs do not exceed whose gain is above 1.1x on one GPU, where the host's
# time is that of eager alone in a process. A test holds them to the published runs.
HALF, MOST = 0.12, 0.17
ERROR = (
    f"half of our graphs that gained over 1.1x on one GPU lay within {100 * HALF:.0f} % of such an estimate, three in "
)
ERROR += f"four within {100 * MOST:.0f} %"


class Point(NamedTuple):
    """A variant on the roofline.

    Attributes:
        program: the variant without graphs that makes the same kernels: eager's, or those of `compile`.
        kernel_us: the GPU's busy time in a step of the program / its kernels.
        host_us: the host's time to issue such a step / its kernels.
        gain: mean step of the program / that of the variant; None of the program itself, and of another program.
    """

    name: str
    program: str
    kernel_us: float
    host_us: float
    gain: float | None

    @property
    def expected(self) -> float:
        """Return the gain that the roofline says."""
        return gain(self.host_us / self.kernel_us)


def gain(ratio: float) -> float:
    """Return the roofline's gain, for the host's time to issue a kernel / the kernel's."""
    return max(1.0, ratio)


def point_of(judged: "Judged", name: str, busy: bool = False) -> Point | None:
    """Return the point of a variant; None on a CPU, and without kernels, busy time or issue time of its program."""
    program = judged.uncaptured(name) if judged.base and judged.run.device == "cuda" else ""
    kernels = judged.build.variants[program].profile.kernels if program else None
    working_ms, issue_ms = judged.working(program).value, judged.issue_ms(program, busy)
    if not kernels or not working_ms or not issue_ms:
        return None
    is_counted = judged.passed(name) and judged.is_same_program(name)
    ratio = judged.ratio_to(program, name, busy) if is_counted else None
    return Point(name, program, 1e3 * working_ms / kernels, 1e3 * issue_ms / kernels, ratio.ratio if ratio else None)


def points_of(judged: "Judged") -> list[Point]:
    """Return the graphs of a build that have a gain, the best first; the base alone where no graph has one."""
    points = [point for name in judged.build.variants if (point := point_of(judged, name))]
    graphs = [point for point in points if point.gain is not None]
    return sorted(graphs, key=lambda point: -(point.gain or 0.0)) or [
        point for point in points if point.name == judged.base
    ]


def sentence(points: Sequence[Point]) -> str:
    """Return the best point in a line; "" without any."""
    if not points:
        return ""
    name, program, kernel_us, host_us, measured = points[0]
    text = f"{cell(kernel_us)} us a kernel at a host of {cell(host_us)} us: the roofline says up to "
    over = f" over {program}" if program == "compile" else ""
    return f"{text}{points[0].expected:.2f}x" + (f"; {name} measured {measured:.2f}x{over}." if measured else ".")


# ------------------------------------------------------------------------------------------------
# A figure: the mean kernel across, the gain up, both logarithmic


def limits(kernel_us: Iterable[float], gains: Iterable[float]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of both axes."""
    times, ratios = [*kernel_us], [*gains]
    across = min(3.0, min(times) / 1.2), max(200.0, max(times) * 1.3)
    return across, (min(0.8, min(ratios) / 1.1), max(5.0, max(ratios) * 1.3))


def line(host_us: float, across: tuple[float, float], top: float = float("inf")) -> list[tuple[float, float]]:
    """Return the corners of a host's line, which is cut at a gain of `top`."""
    high = across[1]
    low = min(max(across[0], host_us / top), high)
    return [(us, gain(host_us / us)) for us in sorted({low, min(max(host_us, low), high), high})]


def ticks(values: Sequence[float], ends: tuple[float, float], gap: float) -> list[float]:
    """Return those of the values on an axis that stand at least this share of its length apart."""
    least, kept = (ends[1] / ends[0]) ** gap, list[float]()
    for value in values:
        if ends[0] <= value <= ends[1] and (not kept or value >= kept[-1] * least):
            kept.append(value)
    return kept
