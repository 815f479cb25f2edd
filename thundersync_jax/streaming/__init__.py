"""Host side of the stream: queue, scheduler, accumulators. Numpy, no model."""
