"""Adam: on FP32 masters, fused, on mixed formats, split over ranks, and in few bytes without masters."""
