"""Host bookkeeping over integers; standard library only."""
