"""cuDNN's LSTM kernels and ours on this GPU: errors against FP32, bitwise repeats, and milliseconds. Takes seconds.

    python -m rnnt.lstm_check              every way to split the work
    python -m rnnt.lstm_check 1024:16:1    one of them, hidden:forward units:cluster

Exit status 1 where a kernel is wrong. Ends by itself after WATCHDOG_S, whatever the GPU does.
"""

import faulthandler
import statistics
import sys
import time

import torch
from torch import nn

from rnnt import lstm as lstm_module
from rnnt import lstm_kernel
from rnnt.config import Config
from rnnt.lstm import Common, Layer, lstm, turns
from rnnt.model import Encoder, Prediction, flatten

WATCHDOG_S = 75
START = time.perf_counter()
DEVICE = torch.device("cuda", 0)
PROBLEMS = []


def say(*words):
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, flush=True)


def make(hidden, inputs, steps):
    torch.manual_seed(0)
    layer = nn.LSTM(inputs, hidden, device=DEVICE).half()
    layer.flatten_parameters()
    x = torch.randn(steps, 8, inputs, device=DEVICE).half().requires_grad_()
    grad = (torch.randn(steps, 8, hidden, device=DEVICE) * 0.1).half()
    return layer, x, grad


def both(run, x, parameters, grad):
    h = run()
    return h, *torch.autograd.grad(h, (x, *parameters), grad)


def error(found, wanted):
    return [
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()
        for a, b in zip(found, wanted, strict=True)
    ]


def time_ms(fn, repeats=4, replays=5):
    """Median per call in a graph of `repeats` calls."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(repeats):
            fn()
    times = []
    for index in range(replays + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        if index:
            times.append(events[0].elapsed_time(events[1]) / repeats)
    return statistics.median(times)


def check(hidden, steps, padding=0):
    """padding: time steps after the longest utterance, where h is 0 and no gradient counts."""
    layer, x, grad = make(hidden, hidden, steps)
    parameters = list(layer.parameters())
    end = steps - padding
    if padding:
        check_padding(parameters, x, grad, end)
        x, grad = x[:end].detach().requires_grad_(), grad[:end]
    ours = both(lambda: lstm(x, [parameters]), x, parameters, grad)
    lstm_kernel.check(DEVICE)
    again = [both(lambda: lstm(x, [parameters]), x, parameters, grad) for _ in range(3)]
    repeated = all(torch.equal(a, b) for other in again for a, b in zip(ours, other, strict=True))
    lstm_kernel.check(DEVICE)
    cudnn = both(lambda: layer(x)[0], x, parameters, grad)
    wide = nn.LSTM(hidden, hidden, device=DEVICE)
    wide.load_state_dict(layer.state_dict())
    wide_x = x.detach().float().requires_grad_()
    wanted = both(lambda: wide(wide_x)[0], wide_x, list(wide.parameters()), grad.float())
    found, reference = error(ours, wanted), error(cudnn, wanted)
    good = repeated and all(a <= max(2 * b, 5e-3) for a, b in zip(found, reference, strict=True))
    names = ("h", "dx", "dW_ih", "dW_hh", "db_ih", "db_hh")
    say(
        f"{'OK ' if good else 'BAD'} H {hidden} T {steps} units {lstm_kernel.FORWARD_UNITS} "
        f"cluster {lstm_kernel.CLUSTER} "
        f"bitwise repeat {repeated}; error of ours/cuDNN against FP32:",
        ", ".join(f"{n} {a:.1e}/{b:.1e}" for n, a, b in zip(names, found, reference, strict=True)),
    )
    if not good:
        PROBLEMS.append((hidden, steps))


def check_stacks():
    """Layers side by side, stretch by stretch, against the same layers one after the other; with dropout, padded."""
    for num, steps, padding in ((2, 409, 30), (3, 205, 0), (3, 205, 150)):
        torch.manual_seed(0)
        layers = [list(nn.LSTM(1024, 1024, device=DEVICE).half().parameters()) for _ in range(num)]
        x = torch.randn(steps, 8, 1024, device=DEVICE).half().requires_grad_()
        grad = (torch.randn(steps, 8, 1024, device=DEVICE) * 0.1).half()
        lengths = torch.full((8,), steps - padding, dtype=torch.int32, device=DEVICE)
        flat = [parameter for layer in layers for parameter in layer]
        results = []
        for at_once in (1, 2, 2):
            torch.manual_seed(1)
            output = lstm(x, layers, lengths, 0, 0.1, at_once)
            results.append((output, *torch.autograd.grad(output, (x, *flat), grad)))
        lstm_kernel.check(DEVICE)
        worst = max(error(results[1], results[0]))
        repeated = all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))
        good = repeated and worst < 5e-3
        say(
            f"{'OK ' if good else 'BAD'} {num} layers, T {steps}, {padding} of it padding, "
            f"{len(turns(num, steps, 2))} turns: bitwise repeat {repeated}, difference {worst:.1e}"
        )
        if not good:
            PROBLEMS.append((num, steps, padding))


def check_padding(parameters, x, grad, end):
    lengths = torch.full((8,), end - 1, dtype=torch.int32, device=DEVICE)
    h, dx, *grads = both(lambda: lstm(x, [parameters], lengths, 1), x, parameters, grad)
    short = x[:end].detach().requires_grad_()
    alone_h, alone_dx, *alone = both(lambda: lstm(short, [parameters]), short, parameters, grad[:end])
    # cuBLAS may take another order of sums for another number of time steps.
    worst = max(error((h[:end], dx[:end], *grads), (alone_h, alone_dx, *alone)))
    good = worst < 5e-3 and not h[end:].any() and not dx[end:].any()
    say(f"{'OK ' if good else 'BAD'} H {h.shape[2]} T {len(h)}: padding from {end} on, difference {worst:.1e}")
    if not good:
        PROBLEMS.append((h.shape[2], len(h), end))


def timed_cudnn(hidden, inputs, steps):
    layer, x, grad = make(hidden, inputs, steps)
    parameters = list(layer.parameters())
    forward = time_ms(lambda: layer(x)[0])
    return forward, time_ms(lambda: both(lambda: layer(x)[0], x, parameters, grad))


def timed_ours(hidden, inputs, steps):
    layer, x, grad = make(hidden, inputs, steps)
    parameters = list(layer.parameters())
    _, w_hh, _, b_hh = (p.detach() for p in parameters)
    gx, h, cells = (torch.randn(steps, 8, size, device=DEVICE).half() for size in (4 * hidden, hidden, hidden))
    gates, grad_gates = (torch.zeros(steps, 8, 4 * hidden, device=DEVICE).half() for _ in range(2))
    state, sums = torch.zeros(8, hidden, device=DEVICE), torch.zeros(4 * hidden, device=DEVICE)
    one, common = ((0, 0, steps),), Common(steps)
    bound = lstm_kernel.bind([Layer(gx, w_hh, b_hh, h, cells, gates, state=state)], common)
    back = Layer(
        grad, w_hh, None, None, cells, gates, grad_gates=grad_gates, grad_bias=sums.half(), state=state, sums=sums
    )
    back = lstm_kernel.bind([back], common)
    kernel_forward = time_ms(lambda: (lstm_kernel.prepare(h), lstm_kernel.forward(bound, one)))
    kernel_backward = time_ms(lambda: (lstm_kernel.prepare(grad_gates), lstm_kernel.backward(back, one)))
    forward = time_ms(lambda: lstm(x, [parameters]))
    whole = time_ms(lambda: both(lambda: lstm(x, [parameters]), x, parameters, grad))
    lstm_kernel.check(DEVICE)
    return kernel_forward, kernel_backward, forward, whole


def networks(which):
    """ms of encoder and prediction network forwards, and of both forwards and backwards."""
    config = Config(lstm=which)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        encoder, prediction = Encoder(config).half(), Prediction(config).half()
    flatten(encoder), flatten(prediction)
    features = torch.randn(409, 8, 256, device=DEVICE).half()
    lengths = torch.full((8,), 409, dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, 1023, (8, 56), device=DEVICE)
    token_lengths = torch.full((8,), 56, dtype=torch.int32, device=DEVICE)
    parameters = [*encoder.parameters(), *prediction.parameters()]

    def whole():
        f, g = encoder(features, lengths)[0], prediction(tokens, token_lengths)
        torch.autograd.grad((f, g), parameters, (torch.ones_like(f), torch.ones_like(g)))

    return (
        time_ms(lambda: encoder(features, lengths), 2),
        time_ms(lambda: prediction(tokens, token_lengths), 2),
        time_ms(whole, 2),
    )


def main():
    if not torch.cuda.is_available():
        sys.exit("python -m rnnt.lstm_check: needs a GPU")
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    say(torch.cuda.get_device_name(DEVICE), torch.__version__)
    settings = [tuple(map(int, word.split(":"))) for word in sys.argv[1:]]
    settings = settings or [(1024, 16, 1), (1024, 16, 4), (1024, 8, 4), (1024, 16, 2)]
    table = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for hidden, units, cluster in settings:
            lstm_kernel.FORWARD_UNITS, lstm_kernel.CLUSTER = units, cluster
            lstm_kernel._Device.of(DEVICE).status.zero_()
            try:
                # The shortest first: what is wrong shows there.
                for steps in (1, 2, 3, 37, 409):
                    check(hidden, steps)
                check(512, 57)
                check(1024, 409, padding=30)
                check(512, 57, padding=56)
                times = timed_ours(hidden, hidden, 409)
            except RuntimeError as failure:
                say("FAILED", hidden, units, cluster, failure)
                PROBLEMS.append((hidden, units, cluster))
                continue
            table.append(((units, cluster), times))
            say(f"units {units} cluster {cluster}", [round(each, 3) for each in times])
        cudnn = timed_cudnn(1024, 1024, 409)
        print(
            f"\nH 1024, T 409, B 8, ms (us a step)\n{'':15}{'recur fwd':>16}{'recur bwd':>16}{'fwd':>9}{'fwd+bwd':>9}"
        )
        print(f"{'cuDNN':16}{'':32}{cudnn[0]:9.3f}{cudnn[1]:9.3f}")
        for (units, cluster), (forward, backward, whole_forward, whole) in table:
            print(
                f"units {units:2} cluster {cluster}"
                f"{forward:9.3f} ({forward / 0.409:4.2f}){backward:9.3f} ({backward / 0.409:4.2f})"
                f"{whole_forward:9.3f}{whole:9.3f}"
            )
        print("recur: with the fill before it")
        # Two layers fit side by side with 16 units in a block.
        table = [row for row in table if row[0][0] == 16]
        if table:
            best = min(table, key=lambda row: row[1][3])[0]
            lstm_kernel.FORWARD_UNITS, lstm_kernel.CLUSTER = best
            check_stacks()
            print(f"\nencoder fwd, prediction fwd, both fwd+bwd, ms; ours with units {best[0]}, cluster {best[1]}")
            for which in ("cudnn", "persistent", "wavefront"):
                print(f"{which:22}", *(f"{each:9.3f}" for each in networks(which)), flush=True)
            for cost in (2, 5, 20, 40):
                lstm_module.TURN_COST = cost
                turns.cache_clear()
                label = f"  TURN_COST {cost}, {len(turns(2, 409, 2))} + {len(turns(3, 205, 2))}"
                print(f"{label:22}", *(f"{each:9.3f}" for each in networks("wavefront")), flush=True)
            lstm_kernel.check(DEVICE)
    say("PROBLEMS " + str(PROBLEMS) if PROBLEMS else "no problems")
    return 1 if PROBLEMS else 0


if __name__ == "__main__":
    sys.exit(main())
