"""Host side of the stream: queue, scheduler, accumulators. Knows types only."""
