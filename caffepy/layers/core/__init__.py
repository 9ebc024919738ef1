"""The Layer base class, scratch buffers, the layout adapter and checks of labels and indices."""
