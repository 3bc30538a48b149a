"""Other libraries' interfaces over Sharpwave's buffers: where a library asks for a class of its own, ours goes in."""
