"""What one call of `make bench` asks for: model, preset, variants and flags, on which GPUs, with which source."""

import os
from pathlib import Path

from benchmarks import ROOT, launch, script, sessions, trust
from benchmarks.command import RUNS, Mistake
from benchmarks.gpus import Gpus
from benchmarks.script import CONTROL

RESULTS = ROOT / "results"
LIMIT_S = {"tiny": 300, "other": 1800}
ROUNDS = {"tiny": 2, "other": 5}
SOURCE = ("git_sha", "git_tree", "git_dirty", "source_hash")
VERSIONS = ("torch", "cuda", "driver", "transformer_engine", "dali", "python")


class Request:
    """A checked command line and the machine that it meets. Raises Mistake for what cannot be.

    args: of `benchmarks.run.parse`. group: the folder of sessions of this kind. nodes: what each node is, by rank.
    place: boots and GPUs by node. source, versions: a session with others is another one. data: what session.json and
    records keep of the request.
    """

    def __init__(self, args):
        self.args, self.model = args, args.model
        self.launch = launch.parse(args)
        presets = script.describe(self.model, [])
        self.root = root_of(args)
        self.nodes = [launch.describe_here()]
        if self.launch.prefix:
            self.nodes = launch.ask_nodes(self.launch, self.root, self.environment(0))
        self.gpus = Gpus(**self.nodes[0]["gpus"])
        self.preset = script.choose_preset(args.preset, presets, self.gpus)
        self.description = script.describe(self.model, args.flags, self.preset)
        self.flags = script.from_root(args.flags, self.description["flags"])
        self.references = self.description.get("reference", {})
        self.variants = script.choose_variants(args.variants, self.description["variants"], self.references)
        if args.control:
            self.variants.insert(1, CONTROL)
        for variant in self.variants:
            # Before a run of it has cost minutes.
            script.kind_of(self.description, variant)
        if self.gpus.names and args.ngpu > len(self.gpus.names):
            raise Mistake(f"--ngpu {args.ngpu}: this machine shows {len(self.gpus.names)}")
        asked = f"--nnodes {args.nnodes} x --ngpu {args.ngpu} (NGPU)"
        script.require_world_size(self.description, self.preset, self.launch.world_size, asked)
        kind = "tiny" if self.preset == "tiny" else "other"
        self.rounds = args.rounds or ROUNDS[kind]
        self.limit_s = args.limit_s or LIMIT_S[kind]
        self.env = self.nodes[0]["env"] | {"world_size": self.launch.world_size}
        self.source = {key: self.env[key] for key in SOURCE}
        self.versions = {key: self.env[key] for key in VERSIONS}
        self.uuids = [list(node["gpus"]["uuids"][: args.ngpu]) for node in self.nodes]
        self.place = [
            {"boot_id": node["env"]["boot_id"], "host": node["env"]["host"], "gpu_uuids": uuids}
            for node, uuids in zip(self.nodes, self.uuids, strict=True)
        ]
        label = sessions.label_of([args.label] if args.label else self.flags, args.host_load)
        self.group = self.root / f"{self.gpus.slug}x{self.launch.world_size}"
        self.group /= sessions.group_name(self.model, self.preset, label)
        self.data = {
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

    def environment(self, number: int) -> dict:
        """The environment of a run of round `number`; compilers keep their caches in the root of the sessions."""
        cache = self.root / ".cache"
        variables = dict(os.environ)
        variables |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        # Else what autograd traced is kept for no model with autograd functions of its own (Stable Diffusion's norms).
        variables.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", "1")
        if number == 0:
            variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        return variables

    def base(self, variant: str) -> str:
        """The variant that this one's numbers are compared with."""
        return self.references.get(variant, "eager")

    @property
    def bases(self) -> list[str]:
        return list(dict.fromkeys(["eager", *map(self.base, self.variants)]))

    def is_here(self, meta: dict) -> bool:
        """Whether a session is of these boots and GPUs."""
        return meta.get("nodes") == self.place

    def goes_on_with(self, meta: dict) -> bool:
        """Whether this call goes on with an open session."""
        return (
            self.is_here(meta)
            and meta.get("request") == self.data
            and meta.get("versions") == self.versions
            and set(meta.get("cores") or []) <= os.sched_getaffinity(0)
            and sessions.why_ended(meta, self.source["source_hash"]) is None
        )

    def finished(self) -> Path | None:
        """The newest packed session that is all this call would measure: same request, machine and source.

        One with a run that failed, or with a record that cannot be read, is none: it would be measured once more.
        """
        for path in reversed(sessions.find(self.group) if self.group.is_dir() else []):
            try:
                meta = sessions.read_meta(path)
            except sessions.Damaged:
                continue
            same = self.is_here(meta) and meta.get("request") == self.data and meta.get("source") == self.source
            if same and meta.get("closed") == "complete" and self._is_enough(meta.get("rounds")) and _is_sound(path):
                return path
        return None

    def _is_enough(self, made):
        if "auto" in (self.rounds, made):
            return made == self.rounds
        return isinstance(made, int) and made >= self.rounds


def root_of(args) -> Path:
    """The root of the sessions. Raises Mistake for results/."""
    root = Path(args.out).resolve() if args.out else RUNS
    if root.is_relative_to(RESULTS):
        raise Mistake(f"--out {args.out}: results/ grows by make publish SESSION=... alone; take another folder")
    return root


def _is_sound(path):
    found, faults = sessions.read_records(path)
    standing = [record for _, record in found if not record["extra"].get("superseded")]
    failed = any(record["status"] in ("failed", "timeout") for record in standing)
    return not (faults or failed or any(map(trust.contradiction, standing)))
