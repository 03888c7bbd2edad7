"""One run of a variant: a training script in a process of its own, and the record that it leaves."""

import json
import subprocess
import sys
from collections.abc import Callable

from benchmarks import ROOT, children, locks, progress, script, sessions, trust
from benchmarks.importer import Importer
from benchmarks.open_session import OpenSession
from benchmarks.script import CONTROL
from common import announce, gpu_state
from common import record as records

PARITY_STEPS = 20
PROBE_LIMIT_S = 120
# A probe is of this host at this moment: these answers of it stand in every record.
PROBED = ("us_per_operator", "us_per_launch")


class Runner:
    """Runs the variants of a session.

    seconds: of each process, those of round 0 by the key False, timed ones by True. took_s: of the last process by the
    name of its record. say(text): prints why a run keeps people waiting.
    """

    def __init__(self, session: OpenSession, say: Callable[[str], None]):
        self.session, self.request, self.say = session, session.request, say
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.took_s: dict[str, float] = {}
        # What forks the runs of a round, and what every run so far had imported.
        self._importer: Importer | None = None
        self._importer_round = -1
        self._modules: set[str] | None = None

    def close(self) -> None:
        """End what forks runs."""
        if self._importer is not None:
            self._importer.close()
        self._importer = None

    # -- the host

    def probe(self, at: str) -> None:
        """What an eager operator and a bare launch cost this host now, in microseconds, into session.json.

        at: "begin", once in a session, or "end". On the CPU where --probe asks for it; several nodes have no probe.
        """
        probes = self.session.meta["probes"]
        asked = (self.request.gpus.names or self.request.args.probe) and not self.request.launch.prefix
        if not asked or (at == "begin" and probes):
            return
        answer = {"at": at, "utc": sessions.utc_text(sessions.now())} | dict.fromkeys(PROBED)
        options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": PROBE_LIMIT_S, "check": True}
        try:
            done = subprocess.run([sys.executable, "-m", "common.probe"], **options)
            said = dict(json.loads((done.stdout.strip().splitlines() or ["nothing"])[-1]))
            answer |= {key: said[key] for key in PROBED if key in said}
        except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
            answer["fault"] = str(error)[:300]
            print(f"no probe of the host: {answer['fault']}")
        self.session.note(probes=[*probes, answer])

    def _others(self):
        uuids = self.request.uuids[0] if not self.request.launch.prefix else []
        return {text for uuid in uuids for text in gpu_state.other_processes(uuid)}

    # -- one child

    def run(self, variant: str, number: int, attempt: int, name: str) -> dict:
        """Run a variant once and return the record it left, or one that says what became of it."""
        session, request = self.session, self.request
        path, log = session.partial / f"{name}.json", session.out / "logs" / f"{name}.log"
        for left in session.partial.glob(f"{name}.*"):
            left.unlink()
        which = "eager" if variant == CONTROL else variant
        command = ["-m", f"{request.model}.train", "--preset", request.preset, "--variant", which]
        command += ["--round", str(number), "--record", str(path)]
        if number:
            command += ["--steps", str(request.args.steps)]
            # The evaluation that belongs to it takes a second of every run that writes one.
            command += ["--mllog", str(log.with_suffix(".mllog"))] if number == 1 else []
        else:
            command += ["--steps", str(request.description.get("parity_steps", PARITY_STEPS)), "--parity"]
            command += ["--parity-steps", str(self._parity_steps(variant))]
        variables = request.environment(number)
        if not request.gpus.names:
            variables = children.waiting_passively(variables)
        importer = self._importer_of(number, variables)
        variables = variables | {announce.VARIABLE: str(session.partial / f"{name}.wait")}
        load = request.args.host_load if number else 0
        others, sessions_here = self._others(), locks.others_here()
        with children.HostLoad(load):
            outcome = children.run_child(
                request.launch.command([*command, *request.flags]),
                log=log,
                limit_s=request.limit_s,
                environment=variables,
                is_remote=bool(request.launch.prefix),
                watch=progress.Watch(variant, variables, self.say).look,
                importer=importer,
            )
        if outcome.modules is not None and outcome.exit_status == 0:
            self._imported(outcome.modules)
        self.seconds[bool(number)].append(outcome.seconds)
        self.took_s[name] = outcome.seconds
        record = self._record(outcome, path, log, variant, number)
        record.update(variant=variant, round=number, attempt=attempt, session=session.meta["session"], host_load=load)
        record["extra"]["forked"] = outcome.modules is not None
        if importer is not None and importer.fault and self.request.args.verbose:
            self.say(f"          not forked: {importer.fault}")
        record["extra"].update(request=request.data, **script.said(request.description, variant))
        conditions = record["conditions"]
        sessions_here = sorted({*sessions_here, *locks.others_here()})
        conditions.update(numa_node=session.meta["numa_node"], other_sessions=sessions_here)
        conditions["others_on_gpu"] = sorted({*conditions["others_on_gpu"], *others, *self._others()})
        if session.meta["probes"]:
            conditions.update({key: session.meta["probes"][0].get(key) for key in PROBED})
        return record

    def _importer_of(self, number, variables):
        """What forks the runs of this round; None for several ranks, and for a script that is none of the models.

        Such a script, as the fakes of tests, may import less than all models do.
        """
        request = self.request
        if request.launch.world_size > 1 or request.launch.prefix or request.model not in script.models():
            return None
        if self._importer is None or number != self._importer_round:
            if self._importer is not None and self._importer.fault:
                # What is imported at times may be what does not survive a fork here.
                self._modules = set()
            self.close()
            self._importer, self._importer_round = Importer(variables, sorted(self._modules or ())), number
        return self._importer

    def _imported(self, modules):
        """Note what a run had imported; what one of them had not is not imported beforehand."""
        self._modules = set(modules) if self._modules is None else self._modules & set(modules)

    def _parity_steps(self, variant):
        """As many as the base made, which makes few of long steps."""
        base = self.session.records.get((self.request.base(variant), 0, 1))
        if self.request.args.parity_steps or base is None:
            return self.request.args.parity_steps
        return len(base["numerics"]["loss"])

    def _record(self, outcome, path, log, variant, number):
        request, status, record = self.request, "failed", None
        ends = f"its log ends: {children.last_lines(log)}"
        try:
            record = records.read(path)
            message = self._fault(record, outcome, variant, ends) if record["status"] == "pass" else ""
        except FileNotFoundError:
            message = f"{outcome.describe()} and no record; {ends}"
        except records.RecordError as error:
            message = str(error)
        if outcome.timed_out:
            status, message = "timeout", f"killed after {request.limit_s:g} s (--limit-s); {ends}"
        if record is None:
            device = "cuda" if request.gpus.names else "cpu"
            of = {"model": request.model, "preset": request.preset, "variant": variant, "round": number}
            record, known = records.blank(**of, device=device), request.env | self._gpu_env()
            record["env"].update({key: value for key, value in known.items() if key in record["env"]})
        if message:
            record.update(status=status, message=message)
        return record

    def _fault(self, record, outcome, variant, ends):
        """What is wrong with a record that says of itself that it passed, in words, or nothing."""
        request, source_hash = self.request, self.session.meta["source"]["source_hash"]
        if outcome.exit_status:
            return f"{outcome.describe()} after its record was written; {ends}"
        if record["env"]["world_size"] != request.launch.world_size:
            asked = f"--nnodes {request.args.nnodes} --ngpu {request.args.ngpu}"
            return f"world size {record['env']['world_size']}, {asked} asks for {request.launch.world_size}"
        if record["env"]["source_hash"] != source_hash:
            return f"the source changed while the session ran: {record['env']['source_hash']}"
        return trust.contradiction(record) or trust.broken_promise(record, self._promise(variant)) or ""

    def _promise(self, variant):
        """What --describe said of graphs and replays; null stands for at least one, None for no promise."""
        description = self.request.description
        which = "eager" if variant == CONTROL else variant
        promise = description.get("promised", {}).get(self.request.preset, {}).get(which)
        return promise and {**promise, "kind": script.kind_of(description, which)}

    def _gpu_env(self):
        gpus = self.request.gpus
        if not gpus.names:
            return {"cuda": None, "driver": None}
        return {"gpu_name": gpus.names[0], "gpu_uuid": gpus.uuids[0], "num_gpus": len(gpus.names)}
