"""sentence-transformers: a random BERT and a pooling, trained with negatives out of the batch."""

import torch
from sentence_transformers import SentenceTransformer, losses, models
from transformers import BertConfig, BertModel


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        self.bert = BertModel(BertConfig(vocab_size=128, **sizes))

    def forward(self, features, **kwargs):
        features["token_embeddings"] = self.bert(features["input_ids"], features["attention_mask"])[0]
        return features


def build(device):
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Words(), models.Pooling(32)], device=str(device)).train()
    loss_fn = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5, fused=True, capturable=device.type == "cuda")
    batches = [torch.randint(0, 128, (2, 8, 12)) for _ in range(8)]

    def step(batch):
        texts = batch.to(device)
        loss = loss_fn([{"input_ids": text, "attention_mask": torch.ones_like(text)} for text in texts], None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
