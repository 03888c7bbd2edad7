"""A teacher whose weights follow the student in place, and whose answers are in the loss."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device).requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, fused=True)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(batch):
        with torch.no_grad():
            wanted = teacher(batch).softmax(-1)
        loss = nn.functional.cross_entropy(student(batch + 0.1 * torch.randn_like(batch)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.01)
        return loss

    return step, batches, [student, teacher, optimizer]
