"""The variant `lightning_graph`: the full iteration replayed inside the loop that Lightning's Trainer owns.

A step that is timed is one turn of the real loop of Trainer.fit: fetch the batch, hooks, replay, progress, hooks. The
loop runs in a greenlet, which hands control back whenever it asks for a batch: no second thread, so that the current
stream and the time of the host are those of the other variants; a switch costs less than a microsecond.
"""

import logging
import signal
import warnings

from common.measure import Capture, Unsupported

WARMUP_STEPS = 3


class LightningGraph:
    """`graph` under Lightning: the capture is CUDAGraphCallback's, in the fourth step of Trainer.fit."""

    def __init__(self, state):
        if state.buckets:
            raise Unsupported("lightning_graph runs on one GPU: common.lightning_graph captures one device's step")
        try:
            import greenlet
            from lightning.pytorch import Trainer
            from lightning.pytorch.plugins.environments import LightningEnvironment

            from common.lightning_graph import CUDAGraphCallback
            from stable_diffusion.lightning_module import DiffusionModule
        except ModuleNotFoundError as error:
            raise Unsupported(f"lightning_graph needs lightning ({error}): ./setup.sh lightning") from None
        # What it says of devices and of its own services is no part of a table.
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.state = state
        self.module = DiffusionModule(state)
        self.callback = CUDAGraphCallback(warmup_steps=WARMUP_STEPS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer = Trainer(
                accelerator="gpu" if state.device.type == "cuda" else "cpu",
                devices=[state.device.index or 0] if state.device.type == "cuda" else 1,
                # Not the environment of torchrun or Slurm: this trainer is alone.
                plugins=[LightningEnvironment()],
                max_epochs=1,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[self.callback],
            )
            self.loop = greenlet.greenlet(lambda: self.trainer.fit(self.module, self.batches))
            self.batches = StepLoader(self, self.loop.parent)
            # Lightning takes SIGTERM for its own purposes; it must go on ending this process.
            handler = signal.getsignal(signal.SIGTERM)
            self.loop.switch()
            signal.signal(signal.SIGTERM, handler)
        self.capture = Capture(strategy="full iteration under Lightning", pools=[self.callback.pool])
        state.inputs.reset()
        with self.capture.timed("warmup_s"):
            for index in range(WARMUP_STEPS):
                self.step(index)
        with self.capture.timed("capture_s"):
            self.step(WARMUP_STEPS)

    def step(self, index: int):
        if self.loop.dead:
            raise RuntimeError("Trainer.fit has ended, after an error in an earlier step")
        self.loop.switch(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        """Let Trainer.fit end as it does after its last batch; the graph is released then."""
        if not self.loop.dead:
            self.loop.switch(None)


class StepLoader:
    """What Trainer.fit reads its batches from: each waits for the next `step(i)`, which loads batch i.

    Has a length because Lightning fetches a batch ahead where it knows none.
    """

    def __init__(self, variant, outside):
        self.variant, self.outside = variant, outside

    def __len__(self):
        return 2**31

    def __iter__(self):
        return self

    def __next__(self):
        index = self.outside.switch()
        if index is None:
            raise StopIteration
        self.variant.module.index = index
        state = self.variant.state
        state.begin_step(index)
        return dict(state.inputs.buffers)
