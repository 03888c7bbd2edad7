"""Graph classification with PyG: GATConv takes out self loops, and the pooling counts the graphs of a batch."""

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool


class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.lin = GATConv(8, 16, heads=2), GCNConv(32, 16), torch.nn.Linear(16, 3)

    def forward(self, data):
        x = self.conv1(data.x, data.edge_index).relu()  # <- shape from values at loop.py
        x = self.conv2(x, data.edge_index).relu()  # <- shape from values at loop.py
        return self.lin(global_mean_pool(x, data.batch))  # <- host read at _scatter.py


def build(device):
    torch.manual_seed(0)
    model = GAT().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=device.type == "cuda")
    graphs = [Data(torch.randn(10, 8), torch.randint(0, 10, (2, 24)), y=torch.randint(0, 3, (1,))) for _ in range(32)]
    batches = [Batch.from_data_list(graphs[index : index + 4]) for index in range(0, 32, 4)]

    def step(data):
        data = data.to(device)
        loss = torch.nn.functional.cross_entropy(model(data), data.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
