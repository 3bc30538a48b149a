# What the stub generator cannot see: add() and sample() are plain C functions (see row_intake.h, bind_table.cpp).
_core.Writer.add:
    def add(self, *args: object, **kwargs: object) -> Any:
        """Adds one row, or n rows with a leading axis, in the schema's order or by name."""

_core.Packer.add:
    def add(self, *args: object, **kwargs: object) -> Any:
        """Packs one row, or n rows with a leading axis, in the schema's order or by name."""

_core.Draw.sample:
    def sample(self, batch_size: object, /, **kwargs: object) -> dict[str, object]:
        """See ReplayBuffer.sample."""
