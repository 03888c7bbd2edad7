"""A throw-away Slurm for tests: munged, slurmctld and a slurmd per node of this machine, in a folder, without systemd.

    with Cluster(folder, num_nodes=2) as cluster:
        cluster.sbatch("--wait", "job.sbatch")

Every node is this machine under another name and port. Nothing outside `folder` is read or written but the programs;
ports are free ones. Works as root and as a plain user, who then can start jobs of his own only.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.helpers.processes import free_ports, until

# Debian keeps the daemons where a plain user's PATH does not look.
DAEMON_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_LIMIT_S = 120.0

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/linear
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SchedulerType=sched/builtin
ReturnToService=2
MinJobAge=3600
KillWait=5
{nodes}
PartitionName=test Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons, from `with` to its end. `environment` makes Slurm's commands talk to them."""

    def __init__(self, folder: Path, num_nodes: int = 1):
        self.folder = Path(folder)
        self.names = [f"node{index}" for index in range(num_nodes)]
        self.processes = []
        self.environment = {**os.environ, "PATH": DAEMON_PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        # A test inside a job of another Slurm must not look like one of this.
        for name in list(self.environment):
            if name.startswith(("SLURM_", "SBATCH_", "PET_")) and name != "SLURM_CONF":
                del self.environment[name]

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        munge = self.folder / "munge"
        munge.mkdir(parents=True)
        # munged refuses folders that others may write into, and its clients must reach the socket.
        self.folder.chmod(0o755)
        munge.chmod(0o711)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._write_config()
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # --force: pytest's folders lie below one that everybody may write into.
        self._daemon("munged", "--foreground", "--force", *[f"--{name}={munge / file}" for name, file in files.items()])
        self._until(lambda: (munge / "socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        for name in self.names:
            self._daemon("slurmd", "-D", "-N", name)
        self._until(lambda: self.states() == ["idle"] * len(self.names), "slurmd")

    def _write_config(self):
        (self.folder / "state").mkdir()
        ports = free_ports(1 + len(self.names))
        cpus = os.cpu_count() or 1
        nodes = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            " RealMemory=100 State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        text = CONFIG.format(
            host=socket.gethostname(),
            ports=ports,
            user=getpass.getuser(),
            folder=self.folder,
            nodes="\n".join(nodes),
            names=",".join(self.names),
        )
        (self.folder / "slurm.conf").write_text(text)

    def _daemon(self, name, *arguments):
        with open(self.folder / f"{name}.out", "ab") as file:
            program = shutil.which(name, path=DAEMON_PATH)
            self.processes.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until(self, condition, what):
        if not until(condition, START_LIMIT_S):
            logs = [path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")]
            raise TimeoutError(f"{what} is not up after {START_LIMIT_S} s\n" + "\n".join(logs))

    def states(self) -> list[str]:
        """One word a node, as sinfo says it."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()

    def run(self, *command, **more) -> subprocess.CompletedProcess:
        """Run a command of Slurm's, or any that calls them; output is text."""
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 300, **more}
        return subprocess.run([str(word) for word in command], **options)

    def job(self, job_id) -> dict:
        """Return the fields that scontrol shows of a job: {"JobState": "COMPLETED", ...}."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until_state(self, job_id, *states, limit_s=300.0) -> str:
        """Wait until the job is in one of `states`; raises TimeoutError that says where it is."""
        deadline = time.monotonic() + limit_s
        while (state := self.job(job_id).get("JobState")) not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {state} after {limit_s} s, not {' or '.join(states)}")
            time.sleep(0.1)
        return state

    def __exit__(self, *_):
        # Jobs first: their steps are daemons of their own and outlive slurmd.
        if len(self.processes) > 1:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}", timeout=10)
                self.run("scancel", f"--user={getpass.getuser()}", timeout=10)
                until(lambda: not self.run("squeue", "--noheader", timeout=10).stdout.strip(), 5)
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
