"""Steps of a variant, followed from the seeded start: what it trained, to compare with eager bit for bit."""

from types import SimpleNamespace

from graph_worth.measuring.course import course


def follow(state, step, count):
    """Losses, gradient norms and hashes of all state after each of `count` steps from the seeded start."""
    training = SimpleNamespace(reset=state.reset, results=state.read_losses, named_state=state.named_state)
    made = course(training, step, count, hashed=range(count))
    return made.losses, state.read_grad_norms(count), made.hashes()


def difference(ours, eager, state) -> str:
    """In words, where two results of `follow` differ bit for bit first; "" where they do not."""
    names = [name for name, _ in state.named_state()]
    differ = (ours[2] != eager[2]).nonzero().tolist()
    if len(differ):
        return f"step {differ[0][0]}: {names[differ[0][1]]}"
    return "" if ours[:2] == eager[:2] else f"losses {ours[0]} {eager[0]}, norms {ours[1]} {eager[1]}"
