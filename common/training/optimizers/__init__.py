"""Adam in four forms: on FP32 masters, fused, on mixed formats, and split over ranks."""
