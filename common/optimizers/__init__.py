"""AdamW on FP32 masters, fused on a GPU; the loss scale of FP16; and a stand-in where no optimizer is wanted."""
