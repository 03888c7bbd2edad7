"""The doctor's findings, each with its place in the user's code, the evidence, and the remedy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# In the order in which they are printed. A note stands against nothing.
STOPS, WRONG, SLOW, NOTE = "cannot be captured", "would train wrongly", "costs time", "note"
# Numbers of the host that change, where eight steps show no effect of them.
MAY = "may train wrongly"
LEVELS = (STOPS, WRONG, MAY, SLOW, NOTE)

# kind -> what to do about it
REMEDIES = {
    "host read": "keep the value on the GPU, and read it after the step: return it, or read it every 100 steps",
    "shape from values": "keep the shape fixed: torch.where or a mask in the place of boolean indexing and nonzero",
    "host data": "make the tensor once in build and copy into it before the step",
    "random state": "seed before training; a generator of your own is handed over with what training changes",
    "moved memory": "give tensors their final size in build, and write into them",
    "collective": "call torch.distributed on NCCL and warm it up before the capture",
    "unknown generator": "hand the generator over with what training changes: return step, batches, [model, generator]",
    "optimizer": "AdamW(..., fused=True, capturable=True), or leave the optimizer eager: graph_fwd_bwd",
    "learning rate": "make lr a tensor, lr=torch.tensor(1e-3, device=device), and call schedule.step() outside of the "
    "step: it fills the tensor; or leave optimizer and schedule eager: graph_fwd_bwd",
    "rate by hand": "hand over a schedule of torch.optim.lr_scheduler in its place, whose step() graph_fwd_bwd leaves "
    "eager",
    "loss scaler": "use bfloat16, which needs no scaler, or a fused optimizer, which takes found_inf on the GPU",
    "control flow": "compute both branches and choose with torch.where, or capture a graph for each branch",
    "shapes of batches": "pad to a few lengths, as pad_to_multiple_of=64 of Transformers' collators does; each shape "
    "needs a graph and its memory",
    "host value": "keep it in a tensor on the GPU and change it there, or change it outside of the step",
    "python random": "draw it on the GPU with torch, or before the step into a tensor of the batch",
    "unseeded data": "seed it: random.seed(0), numpy.random.seed(0) or default_rng(0) in build",
    "kept tensor": "write into one tensor with copy_, made in build: a graph fills the tensor of its capture alone",
    "gradient": "let the step begin with zero_grad(), and make all microbatches of an update in one step; or keep "
    "gradients in place: zero_grad(set_to_none=False)",
    "gradient stream": "make everything, DDP too, under the stream of the capture, and keep no loss of another one",
    "uninitialised memory": "torch.zeros in the place of torch.empty, or write all of it before it is read",
    "capture-aware code": "do the same whether a stream captures or not; what belongs outside goes outside of the step",
    "autocast cache": "begin autocast inside of the step, or with cache_enabled=False",
    "synchronisation": "let nothing in the step wait for the GPU or ask it: wait and measure after the step",
    "pinned memory": "allocate pinned memory once in build",
    "ranks differ": "give all ranks batches of the same shapes in the same order, and let them take the same branches",
    "settings": "NCCL_GRAPH_REGISTER=0, or no expandable segments",
    "wrong copy": "let the step depend on its batch's values alone: not on which object it is, or what is beside it",
    "unpinned copy": "pin the memory once in build, pin_memory(), and copy before the step with non_blocking=True",
    "thread": "let the step's own thread do that work, outside of the step, or give the other one its own generator",
    "side stream": "let the step's stream wait for it at its end: current_stream().wait_stream(side)",
    "compiled graphs": "leave reduce-overhead out of the step: torch.compile(model), and a graph of the whole step",
    "warm-up": "put back what the warm-up of a capture in build has moved, or hand the capture over as `mine`",
    "not handed over": "hand over every object that training changes",
    "not repeatable": "hand over all that training changes, and draw random numbers with torch",
    "your capture": "copy each batch into the tensors of the capture, and keep on the GPU what changes with the steps",
    "wrong numbers": "compare the operators of two steps; what is not in the list of findings may be host code",
    "not finite": "look at that batch, at the learning rate and at the precision: the step fails without a graph, too",
    "memory": "smaller batches or fewer shapes, or graphs of parts: graph_fwd_bwd, graph_modules",
    "capture": "leave the part that the message names eager: graph_fwd_bwd, graph_modules",
}


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: a key of REMEDIES.
        level: one of LEVELS.
        where: file:line of the user's code, or the name of an object.
        evidence: what was seen.
        module: path of the innermost module that was running, or "".
        remedy: what to do about it, where REMEDIES does not say it.
        is_hidden: a host graph does not refuse it.
    """

    kind: str
    level: str
    where: str
    evidence: str
    module: str = ""
    remedy: str = ""
    is_hidden: bool = False

    def text(self, names: Mapping[str, str] | None = None) -> str:
        """Return the finding in two lines; names: those of modules that are printed otherwise."""
        inside = f" in {(names or {}).get(self.module, self.module)}" if self.module else ""
        remedy = self.remedy or REMEDIES[self.kind]
        return f"{self.where}{inside}: {self.kind}, {self.level}: {self.evidence}\n    {remedy}"


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, what stops a capture first; of one kind and place only the first."""
    unique: dict[tuple[str, str], Finding] = {}
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        unique.setdefault((finding.kind, finding.where), finding)
    return list(unique.values())
