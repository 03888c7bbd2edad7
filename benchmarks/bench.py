"""One call of `make bench`: which session it makes or goes on with, and the runs that it adds to it.

`benchmarks.run` is the command line; `benchmarks.sessions` says what a session is on disk.
"""

import itertools
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import (
    compare,
    frame,
    intervals,
    launch,
    law,
    locks,
    parity,
    progress,
    rounds,
    rows,
    script,
    sessions,
    trust,
)
from benchmarks.progress import duration
from benchmarks.script import CONTROL, Mistake
from common import announce, environment
from common import record as records

PARITY_STEPS = 20
LIMIT_S = {"tiny": 300, "other": 1800}
ROUNDS = {"tiny": 2, "other": 5}
PROBE_LIMIT_S = 120
# A probe is of this host at this moment: these answers of it stand in every record.
PROBED = ("us_per_operator", "us_per_launch")
RESULTS = rounds.ROOT / "results"


class Session:
    """One call of the command: what is asked, what this machine is, and the records so far.

    records: (variant, round, attempt) -> record of the runs that stand.
    """

    def __init__(self, args):
        self.model, self.flags, self.args = args.model, args.flags, args
        self.launch = _parse_launch(args)
        description = script.describe(self.model, [])
        self.root = Path(args.out).resolve() if args.out else rounds.ROOT / "runs"
        if self.root == RESULTS or RESULTS in self.root.parents:
            raise Mistake(f"--out {args.out}: results/ grows by make publish SESSION=... alone; take another folder")
        self.nodes = self._ask_nodes()
        self.gpus = rounds.Gpus(**self.nodes[0]["gpus"])
        self.preset = script.choose_preset(args.preset, description, self.gpus)
        self.description = script.describe(self.model, self.flags, self.preset)
        self.flags = rounds.from_root(self.flags, self.description["flags"])
        self.references = self.description.get("reference", {})
        self.variants = script.choose_variants(args.variants, self.description["variants"], self.references)
        if args.control:
            self.variants.insert(1, CONTROL)
        if self.gpus.names and args.ngpu > len(self.gpus.names):
            raise Mistake(f"--ngpu {args.ngpu}: this machine shows {len(self.gpus.names)}")
        self.is_tiny = self.preset == "tiny"
        kind = "tiny" if self.is_tiny else "other"
        self.rounds = args.rounds or ROUNDS[kind]
        self.limit_s = args.limit_s or LIMIT_S[kind]
        self.env = self.nodes[0]["env"] | {"world_size": self.launch.world_size}
        self.uuids = [list(node["gpus"]["uuids"][: args.ngpu]) for node in self.nodes]
        label = sessions.label_of([args.label] if args.label else self.flags, args.host_load)
        self.group = self.root / f"{self.gpus.slug}x{self.launch.world_size}"
        self.group /= sessions.group_name(self.model, self.preset, label)
        self.request = {
            "model": self.model,
            "preset": self.preset,
            "config": self.description["presets"][self.preset],
            "flags": self.flags,
            "variants": self.variants,
            "steps": args.steps,
            "parity_steps": args.parity_steps,
            "num_gpus": args.ngpu,
            "num_nodes": args.nnodes,
            "host_load": args.host_load,
        }
        self.out = self.partial = self.meta = self.lock = None
        self.records: dict[tuple[str, int, int], dict] = {}
        self.faults: list[str] = []
        self.probed: dict = {}
        self.parity_seconds: list[float] = []
        self.timed_seconds: list[float] = []
        # Of the last process by the name of its record.
        self.took_s: dict[str, float] = {}
        self.num_left = 0
        self.out_of_time = False
        self.start = time.monotonic()

    def _ask_nodes(self):
        """What the nodes are, by rank: this machine, or those that the launcher reaches."""
        if not self.launch.prefix:
            return [launch.describe_here(self.model)]
        return launch.ask_nodes(self.launch, self.model, self.root, self._environment(0, self.root))

    # -- which session

    @property
    def _source(self):
        return {key: self.env[key] for key in ("git_sha", "git_tree", "git_dirty", "source_hash")}

    @property
    def place(self) -> list[dict]:
        """Boots and GPUs by node."""
        nodes = zip(self.nodes, self.uuids, strict=True)
        return [{"boot_id": node["env"]["boot_id"], "host": node["env"]["host"], "gpu_uuids": g} for node, g in nodes]

    @property
    def _versions(self):
        return {key: self.env[key] for key in ("torch", "cuda", "driver", "transformer_engine", "dali", "python")}

    def _is_here(self, meta):
        return meta.get("nodes") == self.place

    def continues(self, meta: dict) -> bool:
        """Whether this call goes on with an open session."""
        return (
            self._is_here(meta)
            and meta.get("request") == self.request
            and meta.get("versions") == self._versions
            and set(meta.get("cores") or []) <= set(os.sched_getaffinity(0))
            and sessions.why_ended(meta, self.env["source_hash"]) is None
        )

    def open(self) -> None:
        """Go on with the open session of this request, or begin one; first close those that nothing can continue."""
        self.close_ended()
        mine = [(path, meta) for path, meta in sessions.open_sessions(self.group) if self.continues(meta)]
        if mine:
            self.out, self.meta = mine[-1]
        else:
            cores, numa_node = environment.cores_of([uuid for uuids in self.uuids for uuid in uuids])
            first = self.uuids[0][0] if self.uuids[0] else None
            more = {"request": self.request, "nodes": self.place, "source": self._source, "versions": self._versions}
            more |= {"label": self.group.name.removeprefix(f"{self.model}-{self.preset}").lstrip("-")}
            more |= {"cores": cores, "numa_node": numa_node, "closed": None, "probes": []}
            self.out = sessions.create(self.group, self.env["boot_id"], first, more)
            self.meta = sessions.read_meta(self.out)
        self.partial = self.out / ".partial"
        self.lock = sessions.lock(self.out)
        self._read()
        if not self.launch.prefix:
            os.sched_setaffinity(0, self.meta["cores"])

    def _read(self):
        found, faults = sessions.read_records(self.out)
        for fault in faults:
            # It stays in the session, and its run is made again.
            path = Path(fault.partition(": ")[0])
            kept = self.out / "damaged" / f"{path.name}.{len(list((self.out / 'damaged').glob('*')))}"
            kept.parent.mkdir(exist_ok=True)
            shutil.move(path, kept)
            print(f"set aside in damaged/: {fault.replace(f'{self.out}{os.sep}', '')}")
        for where, record in found:
            contradiction = trust.contradiction(record)
            if contradiction:
                self.faults.append(f"{Path(where).name}: {contradiction}")
            self.records[record["variant"], record["round"], record["attempt"]] = record
        for key, record in list(self.records.items()):
            if record["status"] in ("failed", "timeout"):
                print(f"{frame.short_name(record)} is run anew: its status is {record['status']}")
                self._supersede(key)
        if self.records:
            print(f"goes on with {self.meta['session']}: {len(self.records)} records are there")
        self.partial.mkdir(exist_ok=True)
        for path in self.partial.iterdir():
            if not any(path == self._sidecar(base) and (base, 0, 1) in self.records for base in self._bases):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _supersede(self, key):
        """A failed try stands in the session under a name of its own, and its run is made once more."""
        record = self.records.pop(key)
        variant, number, attempt = key
        path = self.out / records.file_name(variant, number, attempt)
        tries = len(list(self.out.glob(f"{path.stem}.t*.json")))
        record["extra"]["superseded"] = True
        records.write(path.with_name(f"{path.stem}.t{tries + 1}.json"), record)
        path.unlink(missing_ok=True)

    def close_ended(self) -> None:
        """Pack what is open on this boot and GPU and can never go on: the source has changed, or a day is over.

        Removed is what a call that was killed while it packed has left of an open one.
        """
        for path in sessions.left_over(self.root):
            if self._is_here(sessions.read_meta(path.with_name(sessions.session_name(path)))):
                close_session(path, "it is packed already")
        for path, meta in sessions.open_sessions(self.root):
            why = sessions.why_ended(meta, self.env["source_hash"]) if self._is_here(meta) else None
            if why is None and self._is_here(meta) and meta.get("versions") != self._versions:
                why = "versions have changed since"
            if why:
                close_session(path, why)

    def close(self) -> None:
        """All rounds are there: the second probe, then the packed form."""
        if self._probes:
            self._probe("end")
        self.meta["rounds"] = self.rounds
        sessions.write_meta(self.out, self.meta)
        self.out = sessions.pack(self.out, "complete")
        self.lock.close()

    def let_go(self) -> None:
        """Release the session's lock; the process may go on."""
        if self.lock is not None:
            self.lock.close()

    def finished(self) -> Path | None:
        """The newest packed session that is all this call would measure: same request, machine and source.

        One with a run that failed, or with a record that cannot be read, is none: it would be measured once more.
        """
        for path in reversed(sessions.find(self.group) if self.group.is_dir() else []):
            try:
                meta = sessions.read_meta(path)
            except sessions.Damaged:
                continue
            same = self._is_here(meta) and meta.get("request") == self.request and meta.get("source") == self._source
            whole = meta.get("closed") == "complete" and _enough(meta.get("rounds"), self.rounds)
            if same and whole and _is_sound(path):
                return path
        return None

    # -- the host

    @property
    def _probes(self):
        return (bool(self.gpus.names) or self.args.probe) and not self.launch.prefix

    def probe(self) -> None:
        if not self._probes:
            return
        if not self.meta["probes"]:
            self._probe("begin")
        first = self.meta["probes"][0]
        self.probed = {key: first.get(key) for key in PROBED}

    def _probe(self, at):
        """What an eager operator and a bare launch cost this host now, in microseconds; kept in session.json."""
        command = [sys.executable, "-m", "common.probe"]
        answer = {"at": at, "utc": sessions.utc_text(sessions.now())} | dict.fromkeys(PROBED)
        try:
            done = subprocess.run(
                command, cwd=rounds.ROOT, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=True
            )
            answer |= {key: value for key, value in parse_last(done.stdout).items() if key in PROBED}
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            answer["fault"] = str(error)[:300]
            print(f"no probe of the host: {answer['fault']}")
        self.meta["probes"].append(answer)
        sessions.write_meta(self.out, self.meta)

    def _others(self):
        uuids = self.uuids[0] if not self.launch.prefix else []
        return sorted({text for uuid in uuids for text in environment.other_processes(uuid)})

    # -- one child

    def _base(self, variant):
        """The variant that this one's numbers are compared with."""
        return self.references.get(variant, "eager")

    @property
    def _bases(self):
        return list(dict.fromkeys(["eager", *map(self._base, self.variants)]))

    def _sidecar(self, base):
        return self.partial / f"{base}.r0.parity.npz"

    def _child(self, variant, number, attempt, name):
        """Run a variant once and return the record it left, or one that says what became of it."""
        path, log = self.partial / f"{name}.json", self.out / "logs" / f"{name}.log"
        for left in self.partial.glob(f"{name}.*"):
            left.unlink()
        which = "eager" if variant == CONTROL else variant
        command = ["-m", f"{self.model}.train", "--preset", self.preset, "--variant", which]
        command += ["--round", str(number), "--record", str(path)]
        if number:
            command += ["--steps", str(self.args.steps), "--mllog", str(log.with_suffix(".mllog"))]
        else:
            command += ["--steps", str(self.description.get("parity_steps", PARITY_STEPS)), "--parity"]
            command += ["--parity-steps", str(self._parity_steps(variant))]
        variables = self._environment(number, self.out)
        if not self.gpus.names:
            variables = rounds.waiting_passively(variables)
        variables[announce.VARIABLE] = str(self.partial / f"{name}.wait")
        watch = progress.Watch(variant, variables, self._say)
        before = self._others()
        with rounds.HostLoad(self.args.host_load if number else 0):
            outcome = rounds.run_child(
                self.launch.command([*command, *self.flags]),
                log=log,
                limit_s=self.limit_s,
                environment=variables,
                is_remote=bool(self.launch.prefix),
                watch=watch.look,
            )
        (self.timed_seconds if number else self.parity_seconds).append(outcome.seconds)
        self.took_s[name] = outcome.seconds
        record = self._collect(outcome, path, log, variant, number)
        others = sorted({*before, *self._others()})
        record.update(variant=variant, round=number, attempt=attempt, session=self.meta["session"])
        record["host_load"] = self.args.host_load if number else 0
        record["extra"].update(request=self.request, **script.said(self.description, variant))
        record["conditions"].update(numa_node=self.meta["numa_node"], other_sessions=locks.others_here(), **self.probed)
        record["conditions"]["others_on_gpu"] = sorted({*record["conditions"]["others_on_gpu"], *others})
        return record

    def _parity_steps(self, variant):
        """As many as the base made, which makes few of long steps."""
        base = self.records.get((self._base(variant), 0, 1))
        if self.args.parity_steps or base is None:
            return self.args.parity_steps
        return len(base["numerics"]["loss"])

    def _environment(self, number, out):
        cache = out / ".cache" if out == self.root else self.root / ".cache"
        variables = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        if number == 0:
            variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        return variables

    def _collect(self, outcome, path, log, variant, number):
        status, message, record = "failed", "", None
        try:
            record = records.read(path)
        except FileNotFoundError:
            message = f"{outcome.describe()} and no record; its log ends: {rounds.last_lines(log)}"
        except records.RecordError as error:
            message = str(error)
        passed = record is not None and record["status"] == "pass"
        if outcome.timed_out:
            status = "timeout"
            message = f"killed after {self.limit_s:g} s (--limit-s); its log ends: {rounds.last_lines(log)}"
        elif passed and outcome.exit_status:
            message = f"{outcome.describe()} after its record was written; its log ends: {rounds.last_lines(log)}"
        elif passed and record["env"]["world_size"] != self.launch.world_size:
            asked = f"--nnodes {self.args.nnodes} --ngpu {self.args.ngpu}"
            message = f"world size {record['env']['world_size']}, {asked} asks for {self.launch.world_size}"
        elif passed and record["env"]["source_hash"] != self.meta["source"]["source_hash"]:
            message = f"the source changed while the session ran: {record['env']['source_hash']}"
        elif passed:
            message = trust.contradiction(record) or trust.broken_promise(record, self._promise(variant)) or ""
        if record is None:
            record = rounds.blank_record(
                model=self.model,
                preset=self.preset,
                variant=variant,
                round_index=number,
                device="cuda" if self.gpus.names else "cpu",
                env=self.env | self._gpu_env(),
                status=status,
                message=message,
            )
        elif message:
            record.update(status=status, message=message)
        return record

    def _promise(self, variant):
        """What --describe said of graphs and replays; null stands for at least one, None for no promise."""
        which = "eager" if variant == CONTROL else variant
        promise = self.description.get("promised", {}).get(self.preset, {}).get(which)
        return promise and {**promise, "kind": script.kind_of(self.description, which)}

    def _gpu_env(self):
        if not self.gpus.names:
            return {"cuda": None, "driver": None}
        return {"gpu_name": self.gpus.names[0], "gpu_uuid": self.gpus.uuids[0], "num_gpus": len(self.gpus.names)}

    def _twice(self, variant, number, attempt=1, name=None):
        """A run, and once more if it failed or hung; the first try stays in the session."""
        for which in (1, 2):
            start = time.monotonic()
            record = self._child(variant, number, attempt, name or _stem(variant, number, attempt))
            again = which == 1 and record["status"] in ("failed", "timeout")
            if name is None and again:
                self._print_line(record, time.monotonic() - start, "once more")
                self._publish(record)
                self._supersede((variant, number, attempt))
            if not again:
                return record, time.monotonic() - start

    def _publish(self, record):
        """Move a record out of .partial, whole; its trace goes with it. The folder's own path stays out of it."""
        name = _stem_of(record)
        for path in self.partial.glob(f"{name}.*trace.json.gz"):
            path.replace(self.out / path.name)
        for here, word in ((str(self.out), "OUT"), (str(self.root), "ROOT")):
            record["message"] = record["message"].replace(here, word)
            record["argv"] = [text.replace(here, word) for text in record["argv"]]
            variables = record["env"]["variables"]
            record["env"]["variables"] = {key: value.replace(here, word) for key, value in variables.items()}
        records.write(self.out / f"{name}.json", record)
        self.records[record["variant"], record["round"], record["attempt"]] = record
        (self.partial / f"{name}.json").unlink(missing_ok=True)

    # -- round 0

    def measure(self):
        """Round 0 and the timed rounds.

        Where runs take long the first timed round comes right after eager's run of round 0, which the others are
        compared with, so that rows are seen after minutes. It is whole and in its order; what fails the rest of round 0
        fails in that timed round, too (`_take_over_parity`).
        """
        if not self.is_tiny:
            self.parity_round(["eager"], with_controls=False)
            self.timed_rounds(last=1)
        if not self.out_of_time:
            self.parity_round(self.variants)
            self.timed_rounds()

    def parity_round(self, variants, with_controls=True):
        """These variants once, deterministic and untimed: eager, eager again, then the others against eager.

        What others are compared with in eager's place is run twice as well, and before them. Who could not run in a
        timed round is not asked. Without controls no second run is made, and a later call makes it.
        """
        bases = self._bases
        missing = [name for name in variants if (name, 0, 1) not in self.records and name in self._active()]
        missing = [name for name in missing if name != CONTROL]
        for base in bases:
            needed = any(self._base(variant) == base for variant in missing) or self._lacks_control(base)
            lost = needed and base not in missing and not self._sidecar(base).exists()
            if lost and self._stands(base):
                print(f"{base} round 0 is run anew: the others need its parity sidecar")
                self._supersede((base, 0, 1))
                missing.append(base)
        missing.sort(key=lambda variant: bases.index(variant) if variant in bases else len(bases))
        unsure = [base for base in bases if with_controls and (base in missing or self._lacks_control(base))]
        self.num_left = len(missing) + len(unsure)
        for variant in dict.fromkeys([*unsure, *missing]):
            record, seconds = self.records.get((variant, 0, 1)), 0.0
            if record is None:
                record, seconds = self._twice(variant, 0)
                record["numerics"]["reference"] = self._base(variant)
                self.num_left -= 1
            note = ""
            if variant in bases and record["status"] == "pass":
                if with_controls:
                    seconds += self._control(record)
                else:
                    note = "its second run comes after round 1"
            elif record["status"] == "pass":
                if parity.is_run_twice(self.description, variant):
                    seconds += self._control(record)
                if record["status"] == "pass":
                    base = self.records.get((self._base(variant), 0, 1))
                    own = self.partial / f"{variant}.r0.parity.npz"
                    parity.judge(record, base, own, self._sidecar(self._base(variant)), self.description)
            self.num_left -= variant in unsure
            self._publish(record)
            self._print_line(record, seconds, note)
            if variant not in bases:
                (self.partial / f"{variant}.r0.parity.npz").unlink(missing_ok=True)
            for timed in self._group(variant):
                if timed["round"] and self._take_over_parity(timed):
                    self._publish(timed)

    def _without_parity(self):
        """Variants whose round 0 is to come, before the second timed round at the latest."""
        return [v for v in self._active() if (v != CONTROL and (v, 0, 1) not in self.records) or self._lacks_control(v)]

    def _stands(self, base):
        record = self.records.get((base, 0, 1))
        return record is not None and record["status"] in ("pass", "eager_two_runs_differ")

    def _lacks_control(self, base):
        """Its round 0 was run and not yet compared with a second run."""
        record = self.records.get((base, 0, 1))
        return record is not None and record["status"] == "pass" and record["numerics"]["parity"] is None

    def _control(self, record):
        """Eager, or what stands in its place, a second time. Only the verdict is kept, in the first run's record."""
        base = record["variant"]
        # It makes the steps of the first run.
        self.records[base, 0, 1] = record
        control, seconds = self._twice(base, 0, name=f"{base}.r0.control")
        parity.judge_control(record, control, self.partial / f"{base}.r0.control.parity.npz", self._sidecar(base))
        for path in self.partial.glob(f"{base}.r0.control.*"):
            path.unlink()
        return seconds

    # -- timed rounds

    def timed_rounds(self, last=None):
        """ABBA rounds, up to the last one; says why when it stops before the asked number."""
        longest_s, number = 0.0, 0
        wanted = 2 if self.rounds == "auto" else self.rounds
        while True:
            if number == wanted:
                wanted = self._wanted(number)
                if number == wanted:
                    return
            if number == last:
                return
            number += 1
            missing = [v for v in rounds.order(self._active(), number) if (v, number, 1) not in self.records]
            again = self._unsettled(number) if not missing else []
            if not missing and not again:
                continue
            spent = time.monotonic() - self.start
            # Before the first timed round, a child of round 0 is the best guess at one of it.
            longest_run_s = max(self.timed_seconds or self.parity_seconds, default=0.0)
            guess = longest_s or len(missing) * longest_run_s
            if self.args.minutes and spent + guess > self.args.minutes * 60:
                print(f"--minutes {self.args.minutes:g}: round {number} would take {duration(guess)}, not started")
                self.out_of_time = True
                return
            start = time.monotonic()
            self._run_all(missing, number, 1, wanted)
            longest_s = max(longest_s, time.monotonic() - start)
            self._judge_work()
            again = self._unsettled(number)
            if again:
                self._run_all(again, number, 2, wanted)
                self._judge_work()

    def _run_all(self, names, number, attempt, wanted):
        for index, variant in enumerate(names):
            later = itertools.product(self._active(), range(number + 1, self._at_least(wanted) + 1))
            self.num_left = len(names) - index - 1 + sum((*which, 1) not in self.records for which in later)
            record, seconds = self._twice(variant, number, attempt)
            self._take_over_parity(record)
            self._publish(record)
            note = attempt_note(record)
            if variant in self._without_parity() and record["status"] == "pass":
                note = ", ".join(filter(None, [note, "its parity follows"]))
            self._print_line(record, seconds, note)

    def _unsettled(self, number) -> list[str]:
        """Who runs once more in this round: what did not settle, and eager beside it; all, where eager did not."""
        if self.is_tiny:
            return []
        made = {name: self.records.get((name, number, 1)) for name in self._active()}
        odd = [
            name
            for name, record in made.items()
            if record and frame.is_timed(record) and record["conditions"]["settled"] is False
        ]
        if not odd:
            return []
        eagers = [name for name in made if script.kind_of(self.description, name) == "eager"]
        names = list(made) if set(odd) & set(eagers) else [name for name in made if name in (*eagers, *odd)]
        return [name for name in rounds.order(names, number) if (name, number, 2) not in self.records]

    def _active(self):
        """Variants that are worth another timed run."""
        return [
            variant
            for variant in self.variants
            # A verdict on timed work may change with more eager rounds, so it stops nothing.
            if not any(
                record["status"] in rounds.NOT_RUN_AGAIN and not _is_of_timed_work(record)
                for (name, _, _), record in self.records.items()
                if name == variant
            )
        ]

    def _wanted(self, number):
        if self.rounds != "auto":
            return number
        group = rows.group_of([record for record in self.records.values() if trust.contradiction(record) is None])
        results = []
        for session in group.order:
            for name in self._active():
                base = group.base(session, name)
                if base is None:
                    continue
                ratios = rows.log_ratios(rows.pairs(group, session, name, base), lambda record: record["statistic_ms"])
                results += [intervals.paired(ratios)] if ratios and name != base else []
        return intervals.next_num_rounds(results, number)

    def _at_least(self, wanted):
        return max(wanted, intervals.AUTO_MIN_ROUNDS) if self.rounds == "auto" else wanted

    def _group(self, variant):
        return [record for (name, _, _), record in sorted(self.records.items()) if name == variant]

    def _take_over_parity(self, record):
        """What round 0 says of a timed run's variant, if it was made; whether that changed the record.

        A run that was timed before its round 0 failed fails with it.
        """
        first = self.records.get((record["variant"], 0, 1))
        if first is None:
            return False
        keys = ("parity", "reference", "max_rel_diff", "first_difference")
        taken = {key: first["numerics"][key] for key in keys}
        fails = record["status"] == "pass" and first["status"] in rounds.NOT_RUN_AGAIN
        is_new = fails or taken != {key: record["numerics"][key] for key in keys}
        record["numerics"].update(taken)
        record["extra"]["loss_rel_diff"] = first["extra"].get("loss_rel_diff")
        if fails:
            record.update(status=first["status"], message=f"round 0: {first['message']}")
        return is_new

    def _judge_work(self):
        """Whether timed runs prove their work against eager's; all of them again after each round, as the spread is
        known better then."""
        for variant in self.variants:
            base = self._base(variant)
            eager = compare.timed(self._group(base))
            for record in self._group(variant):
                judged = record["status"] == "pass" or _is_of_timed_work(record)
                if not record["round"] or not judged:
                    continue
                beside = [other for other in eager if other is not record]
                beside.sort(key=lambda other, own=record: [other[key] != own[key] for key in ("round", "attempt")])
                fault = trust.unproven(record, beside if variant != base else [])
                if (fault or "") != record["message"].removeprefix(trust.TIMED_WORK):
                    status = "numerics_failed" if fault else "pass"
                    record.update(status=status, message=f"{trust.TIMED_WORK}{fault}" if fault else "")
                    self._publish(record)
                    print(f"{frame.short_name(record)}: {fault or 'its work is proven after all'}")

    # -- what people see

    def print_card(self):
        where = f"{self.gpus.names[0]} x{self.args.ngpu}" if self.gpus.names else f"CPU, {self.env['cpu']}"
        where += f"  {self.args.nnodes} nodes" if self.args.nnodes > 1 else ""
        load = f"  {self.args.host_load} busy processes" if self.args.host_load else ""
        flags = f"  {' '.join(self.flags)}" if self.flags else ""
        print(f"{self.model}/{self.preset}  {where}  torch {self.env['torch']}{load}{flags}")
        print(f"variants {', '.join(self.variants)}  rounds parity + {self.rounds}", flush=True)

    def print_session(self):
        print(f"session  {shown(self.out)}")
        for text in locks.others_here():
            print(f"beside   {text}")
        sys.stdout.flush()

    def _print_line(self, record, seconds, note=""):
        step = f"{record['statistic_ms']:10.2f} ms" if record["statistic_ms"] else f"{'-':>13s}"
        name = "parity " if record["round"] == 0 else f"round {record['round']}"
        status = record["numerics"]["parity"] if record["round"] == 0 and record["status"] == "pass" else None
        width = max(len(variant) for variant in self.variants)
        if self.num_left and note != "once more":
            seen = self.timed_seconds if record["round"] else self.parity_seconds
            least = "at least" if self.rounds == "auto" else "about"
            left_s = self.num_left * statistics.fmean(seen)
            if record["round"] and self.parity_seconds:
                left_s += len(self._without_parity()) * statistics.fmean(self.parity_seconds)
            left = f"{least} {duration(left_s)} left"
            note = f"{note}, {left}" if note else left
        line = f"{name:8s}  {record['variant']:{width}s}  {status or record['status']:16s}{step}"
        print(f"{line}  {duration(seconds):>7s}  {note}".rstrip())
        if record["message"]:
            print(f"          {record['message']}")
        phases = progress.phases(record, self.took_s.get(_stem_of(record))) if self.args.verbose else ""
        if phases:
            print(f"          {phases}")
        sys.stdout.flush()

    def _say(self, text):
        print(text.replace(str(self.root), str(shown(self.root))), flush=True)

    def finish(self) -> int:
        """Close the session if it has all its rounds, write and print its table, and return the exit status."""
        complete = not self.out_of_time
        if complete:
            self.close()
        runs = frame.read(self.out)
        text, table = compare.report(runs.frame, runs.faults, metas=runs.metas, doubts=runs.doubts)
        if not self.args.no_table:
            print(f"\n{text}")
            foretold = law.closing(runs.frame)
            if foretold:
                print("\n" + "\n".join(foretold))
        try:
            compare.write_summary(self.group)
            print(f"\n{shown(self.out)}/: the session\n{shown(self.group)}/table.md: all sessions of this kind")
        except compare.Mixed as error:
            print(f"\n{shown(self.out)}/: the session\nno table of {shown(self.group)}/: {error}")
        if not complete:
            again = f"CLOSE=1 SESSION={shlex.quote(sessions.session_name(self.out))}"
            print(f"the session stays open: the same command goes on with it for a day, make bench {again} closes it")
        bad = [
            f"{row['variant']} ({row['status']})"
            for row in table
            if row["variant"] in self.variants and row["status"] not in ("pass", "oom", "unsupported")
        ]
        if runs.faults:
            bad.append(f"{len(runs.faults)} left out ({'; '.join(fault.partition(':')[0] for fault in runs.faults)})")
        if bad:
            print(f"not sound: {', '.join(bad)}")
        is_timed = any(compare.timed(self._group(variant)) for variant in self.variants)
        if self.out_of_time and not is_timed:
            print(f"no timed round fitted into --minutes {self.args.minutes:g}")
        elif not is_timed:
            print("no timed round: no variant got beyond round 0")
        return 1 if bad or not is_timed else 0


# ------------------------------------------------------------------------------------------------
# Small parts


def close_session(path: Path, why: str) -> Path | None:
    """Pack an open session as it stands and say so; None, in words, where another process works in it."""
    try:
        with sessions.lock(path):
            number = len(sessions.record_files(path))
            if number:
                target = sessions.pack(path, why)
                print(f"closed {shown(target)}: {why}; {number} records")
                return target
            shutil.rmtree(path)
            print(f"removed {shown(path)}: {why}; it has no record")
    except sessions.Busy as busy:
        print(f"not closed: {busy}")
    except (sessions.Damaged, sessions.Refused) as error:
        print(f"not closed: {error}")
    return None


def _is_sound(path):
    found, faults = sessions.read_records(path)
    standing = [record for _, record in found if not record["extra"].get("superseded")]
    failed = any(record["status"] in ("failed", "timeout") for record in standing)
    return not (faults or failed or any(map(trust.contradiction, standing)))


def _enough(made, asked):
    if asked == "auto" or made == "auto":
        return made == asked
    return isinstance(made, int) and made >= asked


def _stem(variant, number, attempt):
    return records.file_name(variant, number, attempt).removesuffix(".json")


def _stem_of(record):
    return _stem(record["variant"], record["round"], record["attempt"])


def _is_of_timed_work(record):
    return record["message"].startswith(trust.TIMED_WORK)


def attempt_note(record):
    if record["conditions"]["settled"] is not False or not record["round"] or record["preset"] == "tiny":
        return ""
    return "not settled" if record["attempt"] == 1 else "not settled again, it stands"


def parse_last(text: str) -> dict:
    """The JSON object in the last line of a program's output. Raises ValueError."""
    import json

    lines = text.strip().splitlines()
    value = json.loads(lines[-1]) if lines else None
    if not isinstance(value, dict):
        raise ValueError("no JSON object in the last line")
    return value


def _parse_launch(args):
    try:
        return launch.parse(args)
    except ValueError as error:
        raise Mistake(str(error)) from None


def shown(path):
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
