"""The pages of the fleet's service: to ask for traces, watch, read, compare and drill down, without being an expert."""
