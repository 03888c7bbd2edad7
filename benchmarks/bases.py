"""Which eager each variant is compared with, over all sessions of one group, and which eagers a session did not run.

The base of a variant is the fastest eager that trains the same, of equal layer, arithmetic and batches; it may launch
other kernels (docs/method.md). The record says what a variant is and which eagers its model has
(`benchmarks.script.said`). For an older record, the model's script of today says it.
"""

import functools
from collections import Counter
from dataclasses import dataclass, field

from benchmarks import frame, intervals, script

# How a run is measured, not what a step computes: sessions that differ in these alone did the same work.
MEASURING = ("min_steps", "min_window_s", "warmup_min_s", "warmup_max_s")
VERSIONS = ("torch", "cuda", "cudnn", "driver")
# Of models that can compute with Transformer Engine's layers: the others never load it, installed or not.
OF_LAYERS = ("transformer_engine",)
# What cannot run on this machine has been tried.
TRIED = ("unsupported", "oom")


@dataclass
class Group:
    """The runs of one folder as dicts, by (session, variant); sessions in order of time.

    bases: session -> its best eager, whatever its layer. own: the same for each class of `class_of`, and without a
    layer for classes of several layers. forced: the base of all, where one was named.
    """

    runs: dict
    order: list
    bases: dict
    own: dict = field(default_factory=dict)
    forced: str | None = None
    _missing: dict = field(default_factory=dict)

    def of(self, session, variant):
        return self.runs.get((session, variant), [])

    def timed(self, session, variant):
        return [row for row in self.of(session, variant) if row["is_timed"]]

    def variant(self, name):
        """All runs of a variant, sessions in order of time."""
        return [row for session in self.order for row in self.of(session, name)]

    def session(self, name):
        """Any run of a session: what it says of the session itself."""
        return next(rows[0] for (session, _), rows in self.runs.items() if session == name)

    def base(self, session: str, variant: str) -> str | None:
        """The best eager of a session among those of the variant's layer, arithmetic and batches; None without one."""
        if self.forced:
            return self.forced
        return self.own.get((session, class_of(self.variant(variant)[0]["record"])))

    def across(self, session: str, variant: str) -> str | None:
        """The same among all kinds of layer; None where the session timed eagers of one kind alone."""
        _, *same = class_of(self.variant(variant)[0]["record"])
        return self.own.get((session, (None, *same)))

    def missing(self, session: str) -> list[str]:
        """Eagers that the best base needs and that the session did not run; none on a CPU, whose times say nothing.

        An eager that cannot run on this machine counts as run. One that was timed in fewer rounds than a session's
        value needs, where another has them, does not: no base is chosen of so few.
        """
        if session not in self._missing:
            self._missing[session] = self._find_missing(session)
        return self._missing[session]

    def _find_missing(self, session):
        own = {variant: rows for (name, variant), rows in self.runs.items() if name == session}
        every = [row for rows in own.values() for row in rows]
        if any(row["device"] != "cuda" for row in every):
            return []
        timed = {
            variant: len({row["round"] for row in rows if row["is_timed"]})
            for variant, rows in own.items()
            if rows[0]["kind"] == "eager"
        }
        least = max(1, min(max(timed.values(), default=0), intervals.MIN_PAIRS))
        tried = {variant for variant, rows in own.items() if any(row["status"] in TRIED for row in rows)}
        needed = dict.fromkeys(name for row in every for name in eagers_of(row["record"]))
        return [name for name in needed if timed.get(name, 0) < least and name not in tried]


def group_of(found, base: str | None = None) -> Group:
    """found: a frame, or records. base: a variant that is the base of every session; None: the best eager.

    Sessions that pool have one base, chosen over all of them: a choice in each session would take the eager that was
    the faster there by chance, and over many sessions that alone gives verdicts (docs/method.md). A session that pools
    with no newer one has its own.
    """
    runs, members, schemas = {}, {}, {}
    for row in frame.of(found).to_dict("records"):
        runs.setdefault((row["session"], row["variant"]), []).append(row)
        members.setdefault(row["session"], []).append(row)
        schemas[row["session"]] = max(row["schema"], schemas.get(row["session"], 0))
    # What schema 1 measured is older than all of schema 2.
    order = sorted(members, key=lambda name: (schemas[name], members[name][0]["begin"], name))
    group = Group(runs, order, dict.fromkeys(order, base), forced=base)
    left = [] if base else list(order)
    while left:
        newest = left[-1]
        together = [name for name in left if _same_eagers(group, name, newest)]
        rows = [row for name in together for row in members[name]]
        group.bases.update(dict.fromkeys(together, choose_base(rows)))
        for kind, own in _classes(rows).items():
            group.own.update(dict.fromkeys(((name, kind) for name in together), choose_base(own)))
        left = [name for name in left if name not in together]
    return group


def _classes(rows):
    """class -> its runs; and for a class of which eagers of several layers were timed, (None, ...) -> all of them."""
    classes, eagers, layers = {}, {}, {}
    for row in rows:
        layer, *same = kind = class_of(row["record"])
        classes.setdefault(kind, []).append(row)
        if row["kind"] == "eager" and row["is_timed"]:
            eagers.setdefault((None, *same), []).append(row)
            layers.setdefault((None, *same), set()).add(layer)
    return classes | {kind: own for kind, own in eagers.items() if len(layers[kind]) > 1}


def class_of(record: dict) -> tuple[str, str, str]:
    """(layer, arithmetic, batches) as the variant's traits name them, "" where they name nothing."""
    own = record["extra"].get("traits")
    if not isinstance(own, dict):
        own = script.traits_of(described(record["model"]), record["variant"])
    return tuple(str(own.get(name, "")) for name in ("layer", "arithmetic", "batches"))


def eagers_of(record: dict) -> list[str]:
    """Eagers of the record's model that the best base needs, by the record, else by the script of today."""
    own = record["extra"].get("eagers")
    return [str(name) for name in own] if isinstance(own, list) else script.eagers_of(described(record["model"]))


@functools.cache
def described(model):
    """What a model's script says of itself; nothing where there is no such script."""
    try:
        return script.describe(model, [])
    except script.Mistake:
        return {}


def _same_eagers(group, name, newest):
    """Whether two sessions timed the same eager programs under the same conditions."""
    sides = [_eagers(group, session) for session in (name, newest)]
    if name == newest:
        return True
    return (
        bool(sides[0])
        and sides[0].keys() == sides[1].keys()
        and all(same_work(sides[0][variant], sides[1][variant]) for variant in sides[0])
    )


def _eagers(group, session):
    own = {variant: group.timed(session, variant) for name, variant in group.runs if name == session}
    return {variant: rows[0] for variant, rows in own.items() if rows and rows[0]["kind"] == "eager"}


def same_work(a: dict, b: dict) -> bool:
    """Two runs of one variant measured one program: schema, configuration, versions, GPU type, code or fingerprint."""
    same = (a["schema"] > 1) == (b["schema"] > 1) and _fixed(a["record"]) == _fixed(b["record"])
    return same and frame.same_program(a["identity"], b["identity"])


def work_of(record: dict) -> dict:
    """The configuration of what a run computes, without how it is measured."""
    return {key: value for key, value in record["config"].items() if key not in MEASURING}


def _fixed(record):
    """What must be equal for sessions to pool."""
    config = work_of(record)
    asked = record["extra"].get("request") or {}
    # Paths of data differ from machine to machine.
    env = {key: record["env"][key] for key in (*VERSIONS, *(OF_LAYERS if "layer" in config else ()))}
    return config, env, record["env"]["gpu_name"], record["env"]["world_size"], record["host_load"], asked.get("steps")


def choose_base(runs: list[dict]) -> str | None:
    """The best eager of some sessions, by 10th percentile over their rounds, by median where steps exceed 0.4 s.

    Of a round that was repeated the last attempt counts. One with fewer runs than a session's value needs is not
    chosen where another has them.
    """
    timed = {}
    for row in sorted((row for row in runs if row["is_timed"] and row["kind"] == "eager"), key=lambda r: r["attempt"]):
        timed[row["variant"], row["session"], row["round"]] = row["record"]["steps"]
    num = Counter(variant for variant, _, _ in timed)
    # Counted before rounds are left out, because a base with one run would leave every row without pairs.
    least = min(max(num.values(), default=0), intervals.MIN_PAIRS)
    names = sorted((name for name in num if num[name] >= least), key=lambda name: (name != "eager", name))
    # Times of a CPU say nothing.
    if len(names) > 1 and all(row["device"] == "cuda" for row in runs):
        # Rounds that one of them lost would compare hosts, not eagers.
        rounds = {(session, number) for _, session, number in timed}
        whole = {place for place in rounds if all((name, *place) in timed for name in names)} or rounds
        steps: dict[str, list] = {name: [] for name in names}
        for (variant, *place), of_run in timed.items():
            if variant in names and tuple(place) in whole:
                steps[variant].append((of_run["gpu_ms"], of_run["batch"]))
        return intervals.choose_base(steps)
    if names:
        return names[0]
    return "eager" if any(row["variant"] == "eager" for row in runs) else None


def standing(group: Group, variant: str) -> tuple[list[str], list[str]]:
    """(sessions that pool with the newest one that timed a variant, other ones that timed it), in order of time.

    Where a session ran all eagers of its model, those that did not are among the others: their base may be slower. So
    are those that have no base at all where another has one. The newest one is of those with as many rounds as a
    session's value needs, where there are any: a shorter one would take a row's value away.
    """
    own = [name for name in group.order if group.of(name, variant)]
    timed = [name for name in own if group.timed(name, variant)]
    if not timed:
        return own[-1:], []
    paired = [name for name in timed if group.timed(name, group.base(name, variant))]
    whole = [name for name in paired if not group.missing(name)] or paired or timed
    newest = ([name for name in whole if _num_pairs(group, name, variant) >= intervals.MIN_PAIRS] or whole)[-1]
    pooled = [name for name in whole if _pools(group, variant, name, newest)]
    return pooled, [name for name in timed if name not in pooled]


def _num_pairs(group, session, variant):
    """Rounds in which the variant and its base were timed."""
    sides = variant, group.base(session, variant) or variant
    return len(set.intersection(*({row["round"] for row in group.timed(session, side)} for side in sides)))


def _pools(group, variant, name, newest):
    if name == newest:
        return True
    if not same_work(group.timed(name, variant)[0], group.timed(newest, variant)[0]):
        return False
    base = group.base(newest, variant)
    if base in (None, variant) or not group.timed(newest, base):
        return True
    return bool(group.timed(name, base)) and same_work(group.timed(name, base)[0], group.timed(newest, base)[0])


def base_of(group: Group, variant: str | None = None) -> str:
    """The base that a variant's rows name, or None: the first of the table. Of the newest session that timed one.

    Sessions that ran all eagers stand before those that did not.
    """
    newest = sorted(reversed(group.order), key=lambda session: bool(group.missing(session)))
    names = [(session, group.base(session, variant) if variant else group.bases[session]) for session in newest]
    timed = [base for session, base in names if base is not None and group.timed(session, base)]
    return next(iter(timed), None) or next((base for _, base in names if base), "eager")
