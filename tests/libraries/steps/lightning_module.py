"""A LightningModule's training_step and optimizer; the docs' running accuracy is updated in each step."""

import lightning
import torch
import torchmetrics


class LitClassifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.accuracy = torchmetrics.classification.Accuracy(task="multiclass", num_classes=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        self.accuracy(logits, y)  # <- kept tensor
        return torch.nn.functional.cross_entropy(logits, y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True, capturable=self.device.type == "cuda")


def build(device):
    torch.manual_seed(0)
    lit = LitClassifier().to(device)
    optimizer = lit.configure_optimizers()
    batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(8)]

    def step(batch):
        loss = lit.training_step(lit.transfer_batch_to_device(batch, device, 0), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [lit, optimizer]
