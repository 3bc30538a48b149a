"""Where a buffer's rows are: a table of the engine on the host, or tensors on a GPU. Both satisfy ``protocol.Rows``."""
