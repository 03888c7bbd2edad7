"""The request for one build: its variants, how its worker is started, and how long to measure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from graph_worth.harness.intervals import LEAST_CYCLES

# A run with shorter blocks shows that variants train alike. It does not show how fast they are.
SHORT_BLOCK_S = 0.5
# With fewer cycles an interval is too wide to be of use.
FEWEST_CYCLES = 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Length and load of a measurement. The help of a flag describes the field of the same name.

    Attributes:
        cycles: number of cycles, or "auto": until every half-width is at most 0.5 %.
        block_s: shortest time of a block.
        most_blocks_s: the slowest variant makes as many steps as the fastest, for at most so many times block_s.
        control: name of the base's repetition in each cycle; "" for none.
        cycles_s: from FEWEST_CYCLES on no cycle begins with which all would take longer. None: all cycles are made.
        is_light: the losses of blocks are the parity, and nothing is measured beside cycles, profiles and eager alone.
        audits: each variant also trains from a state of its own, which eager repeats in another process.
    """

    cycles: int | str = 8
    block_s: float = 1.0
    most_blocks_s: float = 4.0
    minutes: float | None = None
    host_load: int = 0
    control: str = "control"
    limit_s: float = 600.0
    cycles_s: float | None = None
    audits: bool = True
    is_light: bool = False

    @property
    def is_short(self) -> bool:
        """Return whether blocks are too short to measure speed."""
        return self.block_s < SHORT_BLOCK_S

    @property
    def least_cycles(self) -> int:
        """Return the cycles that a run has at least; with a host load every second one is beside it."""
        least = self.cycles if isinstance(self.cycles, int) else LEAST_CYCLES
        return least * (2 if self.host_load else 1)


@dataclass
class BuildRequest:
    """One build of a run.

    Attributes:
        name: "" for the preset as it is; see `facts.joined` for the builds of variants that stand apart.
        apart: the name that its variants besides eager stand apart by.
        fields: fields of the script's configuration that differ from the preset.
        variants: declaration of each variant, in order; see `graph_worth.harness.ask`.
        command: command(variant) starts a worker whose first variant is this one.
        environment: of the worker.
        parity_environment: of a worker for parity only, where the model needs another one.
        eagers: eager variants that may be the base.
        asked_layers: layers of the preset and the flags; a GPU may hold fewer.
        ranks: number of ranks.
    """

    name: str
    fields: dict
    variants: dict[str, dict]
    command: Callable[[str], list[str]]
    environment: dict
    parity_environment: dict | None = None
    eagers: list[str] = field(default_factory=list)
    asked_layers: int | None = None
    ranks: int = 1
    apart: str = ""
