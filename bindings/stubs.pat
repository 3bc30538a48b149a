# What the stub generator cannot see: add() is a plain C function (see bind_writer.cpp).
_core.Writer.add:
    def add(self, *args: object, **kwargs: object) -> None:
        """Adds one row, or n rows with a leading axis, in the schema's order or by name."""
