"""torchrl's DQN: a delayed target network, which follows by SoftUpdate."""

import torch
from tensordict import TensorDict
from torchrl.data import OneHot
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate


def build(device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)).to(device)
    loss_module = DQNLoss(QValueActor(net, in_keys=["observation"], spec=OneHot(3)), delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    updater = SoftUpdate(loss_module, eps=0.99)
    optimizer = torch.optim.Adam(loss_module.parameters(), fused=True, capturable=device.type == "cuda")
    batches = []
    for _ in range(4):
        action, seen, no = torch.eye(3)[torch.randint(0, 3, (16,))], torch.randn(2, 16, 4), torch.zeros(16, 1) > 0
        later = {"observation": seen[1], "reward": torch.randn(16, 1), "done": no, "terminated": no}
        batches.append(TensorDict({"observation": seen[0], "action": action, "next": later}, [16]))

    def step(batch):
        loss = loss_module(batch.to(device))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.step()
        return loss

    return step, batches, [loss_module, optimizer]
