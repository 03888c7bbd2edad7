"""Greedy decoding of a batch of utterances: one symbol step for all of them at once, launched one by one or as a graph.

What a step does has no branches. Each utterance stands at a frame with the prediction network's answer g to its last
label; the likeliest class of the joint either is a label, which is kept and fed to the prediction network, or the
blank, which moves the utterance to its next frame. So does the last label that a frame may have. Finished utterances
stand still. Source: the benchmark's decoder (MLPerf training v3.1, NVIDIA's rnnt/decoder.py), whose labels these are.

Both decoders run the same step, with what can be known beforehand taken out of it: the first LSTM's input products are
rows of a table, and its recurrent product is part of the second layer's (see Search). With the benchmark's two layers
a step on a GPU is three matrix products and three kernels of rnnt/greedy_decoder_kernels.py. What differs is who waits:

    EagerDecoder   six launches a step, then the host reads how many utterances are left
    GraphDecoder   a replay of `unrolled` steps at a time; the host reads the number one replay late, so that the GPU
                   never waits for it. The steps past the end, under 2 * unrolled, change nothing

Both pad a smaller batch to `batch` rows, so that their matrix products, and with them all labels, are the same.
"""

import torch

from common.capture import Pool

NUM_GATES = 4  # input, forget, cell, output: the order in torch's LSTM


class EagerDecoder:
    """decode(f, lengths) for up to `batch` utterances, launch by launch.

    model: an RNNT, whose weights change in place only; dropout is never applied. They are read at construction and
    by `refresh()`, which must follow every change of them. max_symbols_per_frame, max_symbols: how many labels a frame
    and an utterance have at most (the benchmark's 30 and 300).
    """

    def __init__(self, model, batch: int, max_symbols_per_frame: int = 30, max_symbols: int = 300):
        self.search = Search(model, batch, max_symbols_per_frame, max_symbols)

    def decode(self, f, lengths) -> list[list[int]]:
        """Labels of each utterance. f [B, T2, J] from the encoder, lengths int32 [B]: its frames, 0 to T2.

        Raises ValueError for more than `batch` utterances.
        """
        self.load(f, lengths)
        self.loop()
        return self.results()

    @torch.no_grad()
    def load(self, f, lengths) -> None:
        missing = self.search.batch - len(f)
        if missing < 0:
            raise ValueError(f"{len(f)} utterances, the decoder was made for {self.search.batch}: raise its batch")
        self.f = torch.nn.functional.pad(f, (0, 0, 0, 0, 0, missing)) if missing else f
        self.search.start(lengths)

    @torch.no_grad()
    def loop(self) -> int:
        """From load to the end of the last utterance; the number of steps."""
        num_steps = 0
        while num_steps == 0 or self.search.num_active.item():
            self.search.step(self.f)
            num_steps += 1
        return num_steps

    def results(self) -> list[list[int]]:
        return self.search.results()

    def refresh(self) -> None:
        """Read the model's weights again, in place."""
        self.search.refresh()

    def close(self) -> None:
        """Nothing to release."""


class GraphDecoder(EagerDecoder):
    """As EagerDecoder, from a captured graph of `unrolled` steps over an encoder buffer of `frames` frames.

    Make it on the stream that it will be used on, not the default one. decode raises ValueError for more than `frames`
    frames, too.
    """

    def __init__(self, model, batch: int, frames: int, unrolled: int = 8, **limits):
        super().__init__(model, batch, **limits)
        weight = model.joint.linear.weight
        self.unrolled = unrolled
        self.f = torch.zeros(batch, frames, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self.on_cuda = weight.device.type == "cuda"
        self.num_active = torch.zeros(2, dtype=torch.int64, pin_memory=self.on_cuda)
        self.events = [torch.cuda.Event() if self.on_cuda else None for _ in range(2)]
        self.search.start(torch.full((batch,), frames, dtype=torch.int32, device=weight.device))
        self._steps()
        self.pool = Pool(weight.device)
        self.graph, _ = self.pool.capture(self._steps, static_inputs=(self.f,))

    @torch.no_grad()
    def load(self, f, lengths) -> None:
        num_utterances, num_frames = f.shape[:2]
        batch, frames = self.f.shape[:2]
        if num_utterances > batch or num_frames > frames:
            raise ValueError(
                f"{num_utterances} utterances of {num_frames} frames, the decoder's graph holds {batch} of {frames}: "
                "raise its batch or frames"
            )
        self.f[:num_utterances, :num_frames].copy_(f)
        self.search.start(lengths)

    def loop(self) -> int:
        """As EagerDecoder.loop; the number of steps has those past the end."""
        num_replays = 0
        while num_replays < 2 or self._read(num_replays - 2):
            self.graph.replay()
            self.num_active[num_replays % 2].copy_(self.search.num_active, non_blocking=True)
            if self.on_cuda:
                self.events[num_replays % 2].record()
            num_replays += 1
        # Before the next load no copy may be on its way.
        self._read(num_replays - 1)
        return num_replays * self.unrolled

    def close(self) -> None:
        self.pool.release()

    @torch.no_grad()
    def _steps(self):
        for _ in range(self.unrolled):
            self.search.step(self.f)

    def _read(self, replay) -> int:
        """How many utterances were left after this replay, one of the last two."""
        if self.on_cuda:
            self.events[replay % 2].synchronize()
        return int(self.num_active[replay % 2])


# ------------------------------------------------------------------------------------------------
# The search


class Search:
    """The state of a search over `batch` utterances at fixed addresses, and the step that moves it in place.

    x [batch, L H] has the hidden states of all L layers side by side, so that a layer's input and recurrent products
    are one. The first of these products has the first layer's recurrent part for the next label as further columns,
    `recurrent` [batch, 4 H]; `gates` are the results, one for each layer above the first (or that alone).
    c [L, batch, H] is FP32.

    counters, int64 [batch] each: frame, total (labels so far), added (of this frame), done, emitted (in this step).
    labels int64 [batch, max_symbols + 1], whose last column takes what is no label. num_active: int64 0-d.
    """

    def __init__(self, model, batch, max_symbols_per_frame, max_symbols):
        self.model, self.batch = model, batch
        self.max_symbols_per_frame, self.max_symbols = max_symbols_per_frame, max_symbols
        joint, layers = model.joint.linear, model.prediction.layers
        device, dtype = joint.weight.device, joint.weight.dtype
        vocab, width = joint.weight.shape
        hidden = self.hidden = layers[0].hidden_size
        self.num_layers, self.num_gates, self.blank = len(layers), NUM_GATES * hidden, vocab - 1

        def zeros(*shape, dtype=dtype):
            return torch.zeros(shape, dtype=dtype, device=device)

        # Weights: row `blank` of the table is the start, where the input is zero.
        self.table = zeros(vocab, self.num_gates)
        sizes = [(2 * self.num_gates, 2 * hidden), *[(self.num_gates, 2 * hidden)] * (self.num_layers - 2)]
        if self.num_layers == 1:
            sizes = [(self.num_gates, hidden)]
        self.weights = [zeros(*size) for size in sizes]
        self.biases = [zeros(rows) for rows, _ in sizes]

        # What goes on from step to step, and what a search starts with: the answer to the start symbol.
        self.x = zeros(batch, self.num_layers * hidden)
        self.c = zeros(self.num_layers, batch, hidden, dtype=torch.float32)
        self.gates = [zeros(batch, rows) for rows, _ in sizes]
        self.recurrent = self.gates[0][:, -self.num_gates :]
        self.g = zeros(batch, width)
        self.carried = (self.x, self.c, self.recurrent, self.g)
        self.initial = [torch.zeros_like(tensor) for tensor in self.carried]
        self.counters = zeros(5, batch, dtype=torch.int64)
        self.frame, self.total, self.added, self.done, self.emitted = self.counters
        self.labels = zeros(batch, max_symbols + 1, dtype=torch.int64)
        self.num_active = zeros(dtype=torch.int64)

        self.joined, self.logits = zeros(batch, width), zeros(batch, vocab)
        # Views, made once: an eager step would pay for them each time.
        self.layers = [
            (self.x[:, index * hidden : (index + 1) * hidden], self.c[index]) for index in range(self.num_layers)
        ]
        self.products = [
            (bias, self.x[:, index * hidden :][:, : weight.shape[1]], weight.t(), gates)
            for index, (weight, bias, gates) in enumerate(zip(self.weights, self.biases, self.gates, strict=True))
        ]
        last, linear = self.layers[-1][0], model.prediction.linear
        self.to_g = (linear.bias.detach(), last, linear.weight.detach().t())
        self.to_logits = (joint.bias.detach(), self.joined, joint.weight.detach().t())

        self.lengths = zeros(batch, dtype=torch.int64)
        self.rows = torch.arange(batch, device=device)
        self.num_loaded = batch
        self._join, self._advance, self._rise = _parts(device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The model's weights as they are now, in place; ends any search."""
        prediction, hidden = self.model.prediction, self.hidden
        first, *upper = prediction.layers
        bias = first.bias_ih_l0.float() + first.bias_hh_l0.float()
        rows = torch.addmm(bias, prediction.embedding.weight.float(), first.weight_ih_l0.float().t())
        self.table[: self.blank].copy_(rows)
        self.table[self.blank].copy_(bias)
        for layer, weight, bias in zip(upper, self.weights, self.biases, strict=False):
            weight[: self.num_gates].copy_(torch.cat((layer.weight_ih_l0, layer.weight_hh_l0), 1))
            bias[: self.num_gates].copy_(layer.bias_ih_l0.float() + layer.bias_hh_l0.float())
        self.weights[0][-self.num_gates :, :hidden].copy_(first.weight_hh_l0)

        for tensor in self.carried:
            tensor.zero_()
        self.emitted.fill_(1)
        update_layer(self, 0, self.table[self.blank].expand(self.batch, -1))
        self.answer()
        for initial, tensor in zip(self.initial, self.carried, strict=True):
            initial.copy_(tensor)

    @torch.no_grad()
    def start(self, lengths) -> None:
        """To the first frame of new utterances."""
        self.num_loaded = len(lengths)
        self.lengths[: self.num_loaded].copy_(lengths)
        self.lengths[self.num_loaded :].zero_()
        self.counters.zero_()
        torch.le(self.lengths, 0, out=self.done)
        torch.sum(self.lengths > 0, dim=0, out=self.num_active)
        for tensor, initial in zip(self.carried, self.initial, strict=True):
            tensor.copy_(initial)

    def step(self, f) -> None:
        """One symbol of every utterance; f [batch, T2, J]. Can be captured, and changes nothing once all are done."""
        self._join(self, f)
        torch.addmm(*self.to_logits, out=self.logits)
        self._advance(self)
        self.answer()

    def answer(self) -> None:
        """The upper layers and g, once the first layer has read a label; and the first layer's next recurrent part."""
        for layer, (*product, gates) in enumerate(self.products, 1):
            torch.addmm(*product, out=gates)
            if layer < self.num_layers:
                self._rise(self, layer)
        torch.addmm(*self.to_g, out=self.g)

    def results(self) -> list[list[int]]:
        """The labels of the utterances that were loaded; waits for the device."""
        table = torch.cat((self.total.unsqueeze(1), self.labels), 1)[: self.num_loaded].cpu()
        return [row[1 : 1 + int(row[0])].tolist() for row in table]


# ------------------------------------------------------------------------------------------------
# The parts of a step in plain torch; rnnt/greedy_decoder_kernels.py has them for the GPU


def _parts(device):
    if device.type == "cpu":
        return join, advance, rise
    from rnnt import greedy_decoder_kernels as kernels

    return kernels.join, kernels.advance, kernels.rise


def join(search: Search, f) -> None:
    """joined = relu(f at the utterance's frame + g); a finished one has its last frame."""
    last = (search.lengths - 1).clamp_(min=0)
    torch.clamp(f[search.rows, torch.minimum(search.frame, last)] + search.g, min=0, out=search.joined)


def advance(search: Search) -> None:
    """Keep the likeliest label or go to the next frame; where there is a label, the first layer reads it."""
    label, active = search.logits.argmax(1), search.done == 0
    emits = (label != search.blank) & active
    place = torch.where(emits, search.total, search.max_symbols)
    search.labels[search.rows, place] = label
    search.emitted.copy_(emits)
    search.total.add_(search.emitted)
    search.added.add_(search.emitted)
    moves = active & (~emits | (search.added >= search.max_symbols_per_frame))
    search.frame.add_(moves.long())
    search.added.masked_fill_(moves, 0)
    search.done.copy_((search.frame >= search.lengths) | (search.total >= search.max_symbols))
    torch.sum(1 - search.done, dim=0, out=search.num_active)
    update_layer(search, 0, search.recurrent.float() + search.table[label].float())


def rise(search: Search, layer: int) -> None:
    """A layer above the first reads the one below it, where that has read something new."""
    update_layer(search, layer, search.gates[layer - 1][:, : search.num_gates])


def update_layer(search, layer, gates):
    old_h, old_c = search.layers[layer]
    emitted = (search.emitted > 0).unsqueeze(1)
    h, c = cell(gates, old_c)
    old_h.copy_(torch.where(emitted, h.to(old_h.dtype), old_h))
    old_c.copy_(torch.where(emitted, c, old_c))


def cell(gates, c):
    """(h, c), FP32, of an LSTM with gates [B, 4 H] before their nonlinearities and the old c."""
    enters, stays, new, leaves = gates.float().chunk(NUM_GATES, 1)
    c = stays.sigmoid() * c + enters.sigmoid() * new.tanh()
    return leaves.sigmoid() * c.tanh(), c
